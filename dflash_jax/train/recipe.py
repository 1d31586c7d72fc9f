"""Recipes: TOML files that say all about a training run, read strictly."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.errors import UserError
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.data import DataConfig
from dflash_jax.train.export import draft_json
from dflash_jax.train.loss import LossConfig

T = TypeVar("T")
STARTS = ("random", "target")


@dataclasses.dataclass(frozen=True)
class DraftShape:
    """`[draft]`: what `draft_json` takes; the last four are DFlash 2's."""

    version: int
    layers: int
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None

    def json(self, target: TargetConfig) -> dict[str, Any]:
        """config.json of the draft."""
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return draft_json(target, **{**given, "taps": list(self.taps)})


@dataclasses.dataclass(frozen=True)
class Data(DataConfig):
    """`[data]`; requests: texts written at once; draft: what makes the target write faster, and the same: as
    `generate --draft`; prompts: a JSONL file, in the recipe relative to the recipe's folder, with conversations to be
    answered before those from nothing."""

    requests: int = 64
    draft: str = "none"
    prompts: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """`[train]`: `parts` times `sequences` texts of at most `length` tokens a step; the rest as in `TrainConfig` and
    `LossConfig`.  Held-out texts are measured, and the state kept, every `save_every` steps.
    start: `random`, `target` for a draft that begins with the target's last layers, or the folder of a draft of this
    shape (in the recipe relative to the recipe's folder), which is then trained further."""

    steps: int
    sequences: int
    length: int
    parts: int = 1
    anchors: int = 32
    learning_rate: float = 6e-4
    warmup: float = 0.04
    clip: float = 1.0
    weight_decay: float = 0.01
    optimizer: str = "adamw"
    dtype: str = "bfloat16"
    seed: int = 0
    weighting: str = "decay"
    gamma: float | None = None
    dpace_alpha: float = 0.5
    selector_weight: float = 1.0
    slice_rows: int = 2048
    soft: float = 0.0
    start: str = "random"
    log_every: int = 20
    save_every: int = 1000

    def check_start(self) -> None:
        """UserError where training would have nothing to begin with: before data is written, not only afterwards."""
        if self.start not in STARTS and not Path(self.start).is_dir():
            raise UserError(f"[train] start {self.start!r} is neither {' nor '.join(STARTS)} nor a draft's folder")

    def config(self, target: TargetConfig, draft: DraftConfig) -> TrainConfig:
        loss = LossConfig(
            self.weighting, self.gamma, self.dpace_alpha, self.selector_weight, self.slice_rows, self.soft
        )
        return TrainConfig(
            target, draft, self.steps, loss, self.anchors, self.learning_rate, self.warmup, self.clip,
            self.weight_decay, dtype=self.dtype, seed=self.seed, optimizer=self.optimizer,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Recipe:
    """target: a folder, a hub id, a `.gguf` file, or `demo`."""

    target: str
    draft: DraftShape
    data: Data
    train: Plan


def read_recipe(path: Path) -> Recipe:
    """The recipe in a TOML file.  UserError for a file that cannot be read, and for unknown or missing keys."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not TOML: {error}") from error
    parts = {"draft": DraftShape, "data": Data, "train": Plan}
    data, train = raw.get("data"), raw.get("train")
    if isinstance(data, dict) and isinstance(data.get("prompts"), str):
        data["prompts"] = str(path.parent / data["prompts"])
    if isinstance(train, dict) and isinstance(train.get("start"), str) and train["start"] not in STARTS:
        train["start"] = str(path.parent / train["start"])
    sections = {name: _section(kind, f"{path}: [{name}]", raw.get(name, {})) for name, kind in parts.items()}
    return _section(Recipe, str(path), {**raw, **sections})


def _section(kind: type[T], where: str, raw: Any) -> T:
    """`kind` from a TOML table of its fields; whole numbers may stand for others, lists of integers are tuples."""
    if not isinstance(raw, Mapping):
        raise UserError(f"{where} must be a table, not {raw!r}")
    fields: dict[str, Any] = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(raw) - set(fields))
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in raw]
    if unknown or missing:
        problems = [f"unknown {', '.join(unknown)}"] * bool(unknown) + [f"missing {', '.join(missing)}"] * bool(missing)
        raise UserError(f"{where}: {'; '.join(problems)}")
    return kind(**{name: _value(f"{where} {name}", str(fields[name].type), value) for name, value in raw.items()})


def _value(where: str, kind: str, value: Any) -> Any:
    """`value` as the field's declared type wants it."""
    kind = kind.removesuffix(" | None")
    if kind == "float" and type(value) is int:
        return float(value)
    if kind.startswith("tuple") and isinstance(value, list) and all(type(v) is int for v in value):
        return tuple(value)
    wanted = {"int": int, "float": float, "str": str}.get(kind)
    if (wanted is not None and type(value) is not wanted) or kind.startswith("tuple"):
        raise UserError(f"{where} must be {'a list of integers' if kind.startswith('tuple') else kind}, not {value!r}")
    return value
