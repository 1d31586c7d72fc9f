"""The field's data sets by name, asked as the authors' benchmark asks them.

A set is read from `DFLASH_JAX_DATASETS/NAME.jsonl` (or `.json`, `.jsonl.gz`, `.parquet`) where that is there, and
from the Hugging Face hub otherwise.  The rows have the keys of the published files.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.errors import UserError

FOLDER = "DFLASH_JAX_DATASETS"
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
TESTED = "Write a solution to the following problem and make sure that it passes the tests:"
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Where a set is on the hub, which of its files hold the rows, and how a row is asked."""

    hub_id: str
    files: str  # prefix of their names there
    ask: Callable[[Row], Sequence[str]]


def _alpaca(row: Row) -> list[str]:
    """Instruction and, where there is one, its input after an empty line."""
    return [f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]]


DATASETS = {
    "gsm8k": Dataset("openai/gsm8k", "main/test", lambda row: [f"{row['question']}\n{BOXED}"]),
    "math500": Dataset("HuggingFaceH4/MATH-500", "test", lambda row: [f"{row['problem']}\n{BOXED}"]),
    "humaneval": Dataset("openai/openai_humaneval", "openai_humaneval/test",
                         lambda row: [f"{TESTED}\n```python\n{row['prompt']}\n```"]),
    "mbpp": Dataset("google-research-datasets/mbpp", "sanitized/test", lambda row: [row["prompt"]]),
    "mt-bench": Dataset("HuggingFaceH4/mt_bench_prompts", "", lambda row: row["prompt"]),
    "alpaca": Dataset("tatsu-lab/alpaca", "data/train", _alpaca),
}  # fmt: skip


def read_dataset(name: str) -> list[list[str]]:
    """The user's turns of every row."""
    dataset = DATASETS[name]
    paths = local_files(name) or hub_files(name, dataset)
    rows = [row for path in paths for row in read_rows(path)]
    if not rows:
        raise UserError(f"data set {name}: {paths[0]} holds no rows")
    return [asked(name, dataset, row, i) for i, row in enumerate(rows)]


def asked(name: str, dataset: Dataset, row: Row, index: int) -> list[str]:
    try:
        turns = dataset.ask(row)
    except (KeyError, TypeError):
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise UserError(f"data set {name}, row {index} has {keys or 'no keys'}, which is not the set's form") from None
    return [turns] if isinstance(turns, str) else list(turns)


def local_files(name: str) -> list[Path]:
    """The set's file in the folder that the environment names; none without it."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return []
    paths = [Path(folder) / f"{name}{ending}" for ending in (".jsonl", ".json", ".jsonl.gz", ".parquet")]
    return [path for path in paths if path.is_file()][:1]


def hub_files(name: str, dataset: Dataset) -> list[Path]:
    """Downloaded, or from the hub's cache."""
    import huggingface_hub
    from huggingface_hub import errors

    help_ = f"put it into a folder as {name}.jsonl and name the folder in {FOLDER}"
    try:
        found = huggingface_hub.snapshot_download(
            dataset.hub_id, repo_type="dataset", allow_patterns=[f"{dataset.files}*"]
        )
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"data set {name} cannot be had from the hub ({reason}): {help_}") from error
    paths = sorted(p for p in Path(found).rglob("*") if p.suffix in (".jsonl", ".json", ".gz", ".parquet"))
    if not paths:
        raise UserError(f"data set {name}: the hub's {dataset.hub_id} has no file {dataset.files}*: {help_}")
    return paths


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a JSON list, of JSON lines (also compressed), or of Parquet where pyarrow is installed."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
            return
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8-sig")
        listed = text.lstrip().startswith("[")
        yield from json.loads(text) if listed else map(json.loads, filter(str.strip, text.split("\n")))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error


def _parquet_rows(path: Path) -> list[Row]:
    try:
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(f"{path.name} is Parquet, which needs pyarrow: pip install pyarrow") from None
    return pyarrow.parquet.read_table(path).to_pylist()
