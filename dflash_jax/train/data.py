"""Data that the target writes itself, from nothing: a user's turn, then its answer to it; kept in shards.

Token ids throughout: what stands before a turn (the chat template's headers) comes from the recipe.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dflash_jax.engine.engine import Engine
from dflash_jax.errors import UserError
from dflash_jax.sampling import SamplingParams
from dflash_jax.train.blocks import Batch

Written = tuple[list[int], bool]
"""Tokens that were written, the stop token included, and whether one ended them."""
Writer = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], list[Written]]
"""Prompts and how to sample → what the target wrote after each."""

HELD_OUT_EVERY = 50  # 2 % are held out
_LOOP_PERIOD, _LOOP_TIMES = 24, 4  # a text that ends in up to so many tokens so many times over is a loop
_SEEDS_APART = 1_000_003  # between a conversation's number and its seed, so that data seeds do not overlap


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is written.

    user_ids: tokens before a user's turn; turn_ids: between its stop token and the answer; stop_ids end a turn.
    conversations are tried; those whose user's turn does not end or repeats another's, or that loop, are left out.
    """

    user_ids: tuple[int, ...]
    turn_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    conversations: int
    shard: int = 4096
    max_user_tokens: int = 96
    max_answer_tokens: int = 384
    min_answer_tokens: int = 8
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Conversation:
    """tokens of the whole text; those from `start` on are the answer; held_out: not to learn from."""

    tokens: list[int]
    start: int
    held_out: bool


def engine_writer(engine: Engine, stop_ids: Sequence[int]) -> Writer:
    """All prompts through one engine at once."""

    def write(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Written]:
        requests = [
            engine.add_request(prompt, how, eos_token_ids=stop_ids)
            for prompt, how in zip(prompts, params, strict=True)
        ]
        with tqdm(total=len(requests), desc="writing", unit="text", disable=None, leave=False) as bar:
            while engine.has_work:
                engine.step()
                bar.update(sum(r.finished for r in requests) - bar.n)
        return [(list(r.output_ids), r.finish_reason == "stop") for r in requests]

    return write


def write_shards(config: DataConfig, folder: Path, write: Writer) -> list[Path]:
    """The shards of `config` in `folder`, those that are there already as they are; resumable at any point."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    starts = range(0, config.conversations, config.shard)
    for first in tqdm(starts, desc="shards", unit="shard", disable=None):
        path = folder / f"shard-{first // config.shard:05d}.npz"
        paths.append(path)
        if not path.exists():
            numbers = range(first, min(first + config.shard, config.conversations))
            save_shard(path, converse(config, numbers, write))
    return paths


def converse(config: DataConfig, numbers: Sequence[int], write: Writer) -> list[Conversation]:
    """The conversations of those numbers that are fit to learn from, the same ones whoever asks when."""
    found = write([config.user_ids] * len(numbers), [_user_params(config, n) for n in numbers])
    users = {n: turn for n, (turn, ended) in zip(numbers, found, strict=True) if ended and is_fit(turn, 3)}
    users = {n: list(turn) for turn, n in {tuple(turn): n for n, turn in reversed(users.items())}.items()}
    kept = sorted(users)
    prompts = [[*config.user_ids, *users[n], *config.turn_ids] for n in kept]
    answers = write(prompts, [_answer_params(config, n) for n in kept])
    return [
        Conversation(prompt + answer, len(prompt), n % HELD_OUT_EVERY == HELD_OUT_EVERY - 1)
        for n, prompt, (answer, _) in zip(kept, prompts, answers, strict=True)  # one cut by the limit is as good
        if is_fit(answer, config.min_answer_tokens)
    ]


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


def _answer_params(config: DataConfig, number: int) -> SamplingParams:
    """Even numbers greedily, odd ones at a temperature between 0.7 and 1."""
    heat = 0.0
    if number % 2:
        heat = float(np.random.default_rng((config.seed, number)).uniform(0.7, 1.0))
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


def load_shards(folder: Path) -> tuple[list[Conversation], list[Conversation]]:
    """(to learn from, held out) of all shards in `folder`; of equal prompts the first is kept."""
    paths = sorted(folder.glob("shard-*.npz"))
    if not paths:
        raise UserError(f"{folder} has no shards (shard-*.npz)")
    seen: set[tuple[int, ...]] = set()
    learn: list[Conversation] = []
    held: list[Conversation] = []
    for conversation in (c for path in paths for c in _read_shard(path)):
        prompt = tuple(conversation.tokens[: conversation.start])
        if prompt not in seen:
            seen.add(prompt)
            (held if conversation.held_out else learn).append(conversation)
    return learn, held


def _read_shard(path: Path) -> Iterator[Conversation]:
    try:
        with np.load(path) as stored:
            arrays = {name: stored[name] for name in ("tokens", "lengths", "starts", "held_out")}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not a shard that can be read: {error}") from error
    ends = np.cumsum(arrays["lengths"])
    for i, end in enumerate(ends.tolist()):
        tokens = arrays["tokens"][end - int(arrays["lengths"][i]) : end].tolist()
        yield Conversation(tokens, int(arrays["starts"][i]), bool(arrays["held_out"][i]))


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
