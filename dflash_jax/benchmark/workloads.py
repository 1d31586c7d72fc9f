"""What is asked: built-in prompts, the field's data sets, a file of the user's own, or lengths."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.benchmark.contender import Message, Prompt
from dflash_jax.benchmark.datasets import DATASETS, read_dataset
from dflash_jax.errors import UserError
from dflash_jax.text.prompts import shortened

PROMPTS = Path(__file__).parent / "prompts"
BUILT_IN = ("chat", "reasoning", "code", "summarising", "extraction")
LOWEST_ID, IDS = 100, 10_000  # random prompts: no special tokens, and within every real vocabulary
KEYS = ("prompt", "messages", "turns")


@dataclasses.dataclass(frozen=True)
class Item:
    """A prompt, perhaps with further user messages that follow the answers.  `number` counts within the workload."""

    key: str
    prompt: Prompt
    output_len: int
    more: tuple[str, ...] = ()
    ignore_eos: bool = False
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Workload:
    """Items in the order in which they are used, and where they are from."""

    name: str
    items: tuple[Item, ...]

    def take(self, count: int) -> list[Item]:
        """So many items; from the first again where there are fewer."""
        return list(itertools.islice(itertools.cycle(self.items), count))

    @property
    def sha256(self) -> str:
        """Of all prompts in their order, to tell whether two runs asked the same."""
        texts = json.dumps([[item.prompt, item.more, item.output_len] for item in self.items], sort_keys=True)
        return hashlib.sha256(texts.encode()).hexdigest()


def named_workload(names: Sequence[str], output_len: int, ignore_eos: bool, seed: int) -> Workload:
    """The sets called `names`, each shuffled, taken in turns so that every prefix is as mixed as the whole."""
    draw = random.Random(seed)
    sets = []
    for name in names:
        rows = read_set(name)
        draw.shuffle(rows)
        sets.append(rows)
    mixed = [row for rows in itertools.zip_longest(*sets) for row in rows if row is not None]
    items = (Item(key, prompt, output_len, more, ignore_eos, i) for i, (key, prompt, more) in enumerate(mixed))
    return Workload("+".join(Path(name).name for name in names), tuple(items))


def length_workload(input_len: int, output_len: int, count: int, seed: int, vocab_size: int = IDS) -> Workload:
    """Prompts of `input_len` random token ids, answers of exactly `output_len` tokens."""
    draw = random.Random(seed)
    low = min(LOWEST_ID, vocab_size // 2)
    ids = ([draw.randrange(low, min(vocab_size, IDS)) for _ in range(input_len)] for _ in range(count))
    items = (Item(f"random-{i}", prompt, output_len, (), True, i) for i, prompt in enumerate(ids))
    return Workload(f"{input_len} in, {output_len} out", tuple(items))


Row = tuple[str, Prompt, tuple[str, ...]]


def read_set(name: str) -> list[Row]:
    """(key, prompt, further turns) of a built-in set, a data set of the field, or a JSONL file."""
    if name in BUILT_IN:
        return list(read_jsonl(PROMPTS / f"{name}.jsonl", name))
    if name in DATASETS:
        return [(f"{name}-{i}", *as_chat(turns)) for i, turns in enumerate(read_dataset(name))]
    if Path(name).suffix in (".jsonl", ".json") or Path(name).is_file():
        return list(read_jsonl(Path(name), Path(name).stem))
    known = ", ".join((*BUILT_IN, *DATASETS))
    raise UserError(f"workload {name!r} is none of {known}, and no JSONL file")


def as_chat(turns: Sequence[str]) -> tuple[list[Message], tuple[str, ...]]:
    return [{"role": "user", "content": turns[0]}], tuple(turns[1:])


def read_jsonl(path: Path, stem: str) -> Iterable[Row]:
    """The lines of a file: {"prompt": …}, {"messages": […]} or {"turns": […]} each."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read the workload {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the workload {path} is not UTF-8 text: {error}") from error
    rows = [parse_row(line, f"{path.name} line {i}", f"{stem}-{i}")
            for i, line in enumerate(text.split("\n"), 1) if line.strip()]  # fmt: skip
    if not rows:
        raise UserError(f"the workload {path} holds no prompt")
    return rows


def parse_row(line: str, label: str, key: str) -> Row:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{label} is not valid JSON: {shortened(line.strip())}") from None
    found = [name for name in KEYS if isinstance(value, dict) and name in value]
    if len(found) != 1:
        raise UserError(f"{label} must be an object with one of the keys {', '.join(KEYS)}: {shortened(line.strip())}")
    return key, *parse_prompt(value[found[0]], found[0], label)


def parse_prompt(value: Any, key: str, label: str) -> tuple[Prompt, tuple[str, ...]]:
    """A text is a user's message; the chat template is the contender's matter."""
    if key == "prompt" and isinstance(value, str) and value.strip():
        return as_chat([value])
    if key == "prompt" and _list_of(value, int):
        return value, ()
    if key == "turns" and _list_of(value, str):
        return as_chat(value)
    if key == "messages" and _list_of(value, dict) and all("role" in one and "content" in one for one in value):
        return value, ()
    wanted = {"prompt": "text or a list of token ids", "turns": "a list of texts",
              "messages": "a list of objects with role and content"}[key]  # fmt: skip
    raise UserError(f"{label}: {key} must be {wanted}, not {shortened(json.dumps(value))}")


def _list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is kind for one in value)
