"""Data that the target writes itself, kept in shards: answers to given prompts, and, from nothing, a user's turn and
the answer to it.

Token ids throughout: what stands before a turn (the chat template's headers) comes from the recipe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.request import Request
from dflash_jax.errors import UserError
from dflash_jax.sampling import SamplingParams
from dflash_jax.train.blocks import Batch
from dflash_jax.train.prompts import HELD_OUT_EVERY, Prompt

Written = tuple[list[int], bool]
"""Tokens that were written, the stop token included, and whether one ended them."""
Writer = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], list[Written]]
"""Prompts and how to sample → what the target wrote after each."""

MADE_OF = "made-of.json"
_LOOP_PERIOD, _LOOP_TIMES = 24, 4  # a text that ends in up to so many tokens so many times over is a loop
_SEEDS_APART = 1_000_003  # between a conversation's number and its seed, so that data seeds do not overlap


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is written.

    user_ids: tokens before a user's turn; turn_ids: between its stop token and the answer; stop_ids end a turn.
    Conversations are numbered: answers_per_prompt answers to each given prompt come first, the first of them greedy,
    then `conversations` from nothing.  Those whose user's turn does not end or repeats another's, or that loop, are
    left out.
    """

    user_ids: tuple[int, ...]
    turn_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    conversations: int
    answers_per_prompt: int = 2
    shard: int = 4096
    max_user_tokens: int = 96
    max_answer_tokens: int = 384
    min_answer_tokens: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("conversations", 0), ("answers_per_prompt", 1), ("shard", 1), ("max_answer_tokens", 1)):
            if getattr(self, name) < low:
                raise UserError(f"[data] {name} must be at least {low}, not {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class Conversation:
    """tokens of the whole text; those from `start` on are the answer; held_out: not to learn from."""

    tokens: list[int] | np.ndarray
    start: int
    held_out: bool


def answered(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], stop_ids: Sequence[int]
) -> list[Request]:
    """All prompts through one engine at once, with a progress bar; UserError where the target's logits fail."""
    requests = [
        engine.add_request(prompt, how, eos_token_ids=stop_ids) for prompt, how in zip(prompts, params, strict=True)
    ]
    with tqdm(total=len(requests), desc="writing", unit="text", disable=None, leave=False) as bar:
        while engine.has_work:
            engine.step()
            bar.update(sum(r.finished for r in requests) - bar.n)
    failed = sum(r.finish_reason == "error" for r in requests)
    if failed:
        raise UserError(f"{failed} of {len(requests)} texts had to be given up: the target's logits are not numbers")
    return requests


def engine_writer(engine: Engine, stop_ids: Sequence[int]) -> Writer:
    """A writer over `answered`."""

    def write(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Written]:
        found = answered(engine, prompts, params, stop_ids)
        return [(list(r.output_ids), r.finish_reason == "stop") for r in found]

    return write


@dataclasses.dataclass(frozen=True)
class Part:
    """Of several processes that write one run's shards, this one: those whose number is `index` modulo `count`."""

    index: int = 0
    count: int = 1


def shard_paths(config: DataConfig, folder: Path, given: Sequence[Prompt] = (), part: Part | None = None) -> list[Path]:
    """All shards of `config`, or those of one part."""
    part = part or Part()
    shards = -(-count_of(config, given) // config.shard)
    return [folder / f"shard-{i:05d}.npz" for i in range(part.index, shards, part.count)]


def count_of(config: DataConfig, given: Sequence[Prompt]) -> int:
    """Conversations in all."""
    return len(given) * config.answers_per_prompt + config.conversations


def write_shards(
    config: DataConfig, folder: Path, write: Writer, given: Sequence[Prompt] = (), part: Part | None = None
) -> list[Path]:
    """The shards of `config` in `folder`, those that are there already as they are; resumable at any point."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = shard_paths(config, folder, given, part)
    for path in tqdm(paths, desc="shards", unit="shard", disable=None):
        if not path.exists():
            first = int(path.stem.removeprefix("shard-")) * config.shard
            numbers = range(first, min(first + config.shard, count_of(config, given)))
            save_shard(path, converse(config, numbers, write, given))
    return paths


def converse(
    config: DataConfig, numbers: Sequence[int], write: Writer, given: Sequence[Prompt] = ()
) -> list[Conversation]:
    """The conversations of those numbers that are fit to learn from, the same ones whoever asks when."""
    first = len(given) * config.answers_per_prompt  # of those from nothing
    asked = {n: list(given[n // config.answers_per_prompt].tokens) for n in numbers if n < first}
    asked |= _invented(config, [n for n in numbers if n >= first], write)
    held = {n: given[n // config.answers_per_prompt].held_out if n < first else _is_held_out(n) for n in asked}
    greedy = {n: n % (config.answers_per_prompt if n < first else 2) == 0 for n in asked}
    answers = write(list(asked.values()), [_answer_params(config, n, greedy[n]) for n in asked])
    return [
        Conversation(prompt + answer, len(prompt), held[n])
        for (n, prompt), (answer, _) in zip(asked.items(), answers, strict=True)  # one cut by the limit is as good
        if is_fit(answer, config.min_answer_tokens)
    ]


def _invented(config: DataConfig, numbers: Sequence[int], write: Writer) -> dict[int, list[int]]:
    """Prompts that the target writes, by number; of equal ones the first."""
    if not numbers:
        return {}
    found = write([config.user_ids] * len(numbers), [_user_params(config, n) for n in numbers])
    users: dict[tuple[int, ...], int] = {}
    for n, (turn, ended) in zip(numbers, found, strict=True):
        if ended and is_fit(turn, 3):
            users.setdefault(tuple(turn), n)
    return {n: [*config.user_ids, *turn, *config.turn_ids] for turn, n in users.items()}


def _is_held_out(number: int) -> bool:
    return number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def is_fit(tokens: Sequence[int], at_least: int) -> bool:
    """Long enough, and not ending in a loop (the stop token aside)."""
    body = list(tokens[:-1])
    return len(tokens) >= at_least and not any(_loops(body, period) for period in range(1, _LOOP_PERIOD + 1))


def _loops(tokens: list[int], period: int) -> bool:
    """Are the last tokens the same `period` of them, over and over?"""
    times = _LOOP_TIMES if period > 2 else 2 * _LOOP_TIMES  # short ones happen: dots, digits, spaces
    tail = tokens[-period * times :]
    return len(tail) == period * times and tail == tail[:period] * times


def _user_params(config: DataConfig, number: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=config.max_user_tokens, temperature=1.0, seed=config.seed * _SEEDS_APART + number
    )


def _answer_params(config: DataConfig, number: int, greedy: bool) -> SamplingParams:
    """Greedy, or at a temperature between 0.7 and 1."""
    heat = 0.0 if greedy else float(np.random.default_rng((config.seed, number)).uniform(0.7, 1.0))
    return SamplingParams(
        max_new_tokens=config.max_answer_tokens, temperature=heat, seed=config.seed * _SEEDS_APART + number
    )


# -- shards ----------------------------------------------------------------------------------------------------------


def save_shard(path: Path, conversations: Sequence[Conversation]) -> None:
    """Written aside and renamed, so that a shard is whole if it is there."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("wb") as file:
        np.savez(
            file,
            tokens=np.array([t for c in conversations for t in c.tokens], np.int32),
            lengths=np.array([len(c.tokens) for c in conversations], np.int32),
            starts=np.array([c.start for c in conversations], np.int32),
            held_out=np.array([c.held_out for c in conversations], bool),
        )
    aside.rename(path)


def check_made_of(folder: Path, made_of: Mapping[str, Any]) -> None:
    """Keep beside the shards what they are made of (anything JSON can hold); UserError if it was something else."""
    folder.mkdir(parents=True, exist_ok=True)
    path, aside = folder / MADE_OF, folder / f".{MADE_OF}.{os.getpid()}"
    aside.write_text(json.dumps(made_of, indent=2) + "\n", encoding="utf-8")
    with contextlib.suppress(FileExistsError):  # of several processes that start together one writes it
        os.link(aside, path)
    aside.unlink()
    found, wanted = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(made_of))
    keys = [key for key in sorted({*found, *wanted}) if found.get(key) != wanted.get(key)]
    if keys:
        changes = "; ".join(f"{key} {found.get(key)!r}, now {wanted.get(key)!r}" for key in keys)
        raise UserError(f"{folder} holds data of another recipe ({changes}): choose another folder, or delete this one")


def load_shards(folder: Path) -> tuple[list[Conversation], list[Conversation]]:
    """(to learn from, held out) of all shards in `folder`; of equal texts the first is kept.

    All answers to one prompt are on the side of its first.
    """
    paths = sorted(folder.glob("shard-*.npz"))
    if not paths:
        raise UserError(f"{folder} has no shards (shard-*.npz)")
    seen: set[bytes] = set()
    sides: dict[bytes, bool] = {}
    found: tuple[list[Conversation], list[Conversation]] = [], []
    for one in (c for path in paths for c in _read_shard(path)):
        text = _digest(one.tokens)
        if text not in seen:
            seen.add(text)
            held_out = sides.setdefault(_digest(one.tokens[: one.start]), one.held_out)
            found[held_out].append(dataclasses.replace(one, held_out=held_out))
    return found


def _digest(tokens: list[int] | np.ndarray) -> bytes:
    """Stands for the tokens in little memory: there are millions of texts."""
    return hashlib.blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()


def _read_shard(path: Path) -> Iterator[Conversation]:
    """Its conversations, whose tokens are views of one array: as lists, millions of texts would take gigabytes."""
    try:
        with np.load(path) as stored:
            arrays = {name: stored[name] for name in ("tokens", "lengths", "starts", "held_out")}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not a shard that can be read: {error}") from error
    ends, lengths, starts, held_out = (
        x.tolist() for x in (np.cumsum(arrays["lengths"]), arrays["lengths"], arrays["starts"], arrays["held_out"])
    )
    for end, length, start, held in zip(ends, lengths, starts, held_out, strict=True):
        yield Conversation(arrays["tokens"][end - length : end], start, held)


# -- batches ---------------------------------------------------------------------------------------------------------


def batch_at(
    step: int, conversations: Sequence[Conversation], parts: int, sequences: int, length: int, seed: int
) -> Batch:
    """The batch [M, S, T] of a step, on the host: each pass over the data is shuffled, and known from `step` alone.

    Texts longer than `length` are cut.
    """
    count = parts * sequences
    chosen = [conversations[i] for i in _numbers(step * count, count, len(conversations), seed)]
    return stacked(chosen, length, (parts, sequences))


def stacked(chosen: Sequence[Conversation], length: int, shape: tuple[int, ...]) -> Batch:
    """Conversations as a batch of that leading shape, padded with 0."""
    tokens = np.zeros((len(chosen), length), np.int32)
    for row, conversation in zip(tokens, chosen, strict=True):
        row[: len(conversation.tokens)] = conversation.tokens[:length]
    starts = np.array([c.start for c in chosen], np.int32)
    lengths = np.array([min(len(c.tokens), length) for c in chosen], np.int32)
    return Batch(tokens.reshape(*shape, length), starts.reshape(shape), lengths.reshape(shape))  # type: ignore[arg-type]


def _numbers(first: int, count: int, size: int, seed: int) -> list[int]:
    """Entries first … first + count − 1 of an endless row of shuffled passes over `size` items."""
    found: list[int] = []
    while len(found) < count:
        epoch, at = divmod(first + len(found), size)
        found += _order(seed, epoch, size)[at : at + count - len(found)].tolist()
    return found


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)
