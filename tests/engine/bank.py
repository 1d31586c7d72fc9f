"""Prompts whose outputs are known, and sure: what each gives alone, for any limit and any stop tokens.

Rounding differs from one bucket of rows to another, so where two tokens are nearly equally likely the outcome may
differ too.  Such prompts are left out: those whose target prefers some token by less than MIN_GAP, and those for which
weights with exaggerated rounding errors give another output or another acceptance.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from .device import Device, greedy, perturbed, preference, random_prompt, serve, solo, target_logits

NEW = 80
MIN_GAP = 2e-3
LENGTHS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 120, 250, 600)


@dataclass(frozen=True)
class Known:
    """A prompt and its solo run."""

    prompt: list[int]
    tokens: list[int]
    accepted: list[int]

    def cut(self, new: int, stop_ids: Sequence[int] = ()) -> tuple[list[int], list[int], str]:
        """Tokens, acceptance and reason under a limit and stop tokens: the same, up to where they end it."""
        tokens, reason = self.tokens[:new], "length"
        ends = [i for i, token in enumerate(tokens, 1) if token in stop_ids]
        if ends:
            tokens, reason = tokens[: ends[0]], "stop"
        accepted, left = [], len(tokens) - 1
        for count in self.accepted:
            if left:
                accepted.append(min(count, left))
                left -= accepted[-1]
        return tokens, accepted, reason


def make_bank(device: Device, size: int, seed: int = 0) -> list[Known]:
    """`size` prompts of 1 to 600 tokens, many of which begin alike or go on from another's output; fewer if unsure."""
    known = [_run(device, prompt, NEW) for prompt in _prompts(device, size, random.Random(seed))]
    kept = [one for one, is_sure in zip(known, _sure(device, known, noises=(1, 2)), strict=True) if is_sure]
    assert len(kept) > 0.6 * size, f"only {len(kept)} of {size} prompts are sure"
    return kept


@functools.cache
def sure_prompts(device: Device, lengths: tuple[int, ...], new: int = 40) -> list[Known]:
    """A sure random prompt of each length, with what it gives up to `new` tokens."""
    known = [_run(device, random_prompt(device, length, seed), new) for seed in range(3) for length in lengths]
    sure = [one for one, is_sure in zip(known, _sure(device, known), strict=True) if is_sure]
    return [_take(sure, length) for length in lengths]


def _take(known: list[Known], length: int) -> Known:
    return known.pop(next(i for i, one in enumerate(known) if len(one.prompt) == length))


def _sure(device: Device, known: list[Known], noises: Sequence[int] = (1,)) -> list[bool]:
    """Whether rounding cannot change an output or an acceptance."""
    sure = [_is_sure(device, one) for one in known]
    for noise in noises:
        with device.weighing(perturbed(device.weights, noise)):
            engine = device.engine(enable_prefix_caching=False)
            again = [engine.add_request(one.prompt, greedy(len(one.tokens))) for one in known]
            serve(engine)
        sure = [
            was and (one.tokens, one.accepted) == (other.output_ids, other.accept_lengths)
            for was, one, other in zip(sure, known, again, strict=True)
        ]
    return sure


def _is_sure(device: Device, known: Known) -> bool:
    """Whether the target alone, without engine, draft or cache, clearly prefers some token each time: these tokens."""
    logits = target_logits(device, [*known.prompt, *known.tokens])[len(known.prompt) - 1 : -1]
    if preference(logits).min() < MIN_GAP:
        return False
    assert logits.argmax(axis=-1).tolist() == known.tokens, "the solo run is not the target's own text"
    return True


def _run(device: Device, prompt: list[int], new: int) -> Known:
    request = solo(device, prompt, greedy(new))
    return Known(prompt, request.output_ids, request.accept_lengths)


def _prompts(device: Device, size: int, rng: random.Random) -> list[list[int]]:
    def tokens(count: int) -> list[int]:
        return [rng.randrange(device.vocab_size) for _ in range(count)]

    bases = [tokens(600) for _ in range(3)]
    prompts: list[list[int]] = []
    while len(prompts) < size:
        length = rng.choice(LENGTHS)
        head = rng.choice([[], *bases])
        if prompts and rng.random() < 0.2:  # a next turn: what came before, its answer, and something new
            before = rng.choice(prompts)
            head = [*before, *_run(device, before, NEW).tokens[: rng.randrange(1, NEW)]]
            length = len(head) + rng.choice((1, 5, 20))
        tail = rng.choice((1, 1, 2, 9, 30))
        prompt = [*head[: max(0, length - tail)], *tokens(min(tail, length))]
        if len(prompt) <= 600:
            prompts.append(prompt)
    return prompts
