"""Any order of arrivals, chunks, batches and block widths gives the text of plain decoding (invariant 1)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dflash_jax.ops import LENGTH
from dflash_jax.state import DecodeState
from steps.fakes import prompt_of, script, scripted_lab, truth
from steps.lab import Request, Run, poisoned

WIDTHS = (1, 2, 3, 5, 8)


class Schedule:
    """Four slots, requests that come and go at random, and what each round should have accepted."""

    def __init__(self, seed: int, count: int = 12):
        self.rng = np.random.default_rng(seed)
        self.lab = scripted_lab()
        self.state: DecodeState = self.lab.state()
        self.waiting = [self._request() for _ in range(count)]
        self.active: list[Request] = []
        self.done: list[Request] = []

    def _request(self) -> Request:
        prompt = prompt_of(int(self.rng.choice([1, 5, 8, 16, 33, 40])))
        return Request(-1, prompt, len(prompt) + int(self.rng.integers(1, 40)))

    def _run(self, requests: list[Request], right: int) -> Run:
        weights = script(self.lab, right, self.active)
        return Run(dataclasses.replace(self.lab, weights=weights), requests, self.state, admit=False)

    def arrive(self) -> None:
        """Some of those that wait get a free slot, whose pages hold what the last request left there."""
        free = sorted(set(range(4)) - {request.slot for request in self.active})
        count = int(self.rng.integers(0 if self.active else 1, len(free) + 1))
        new = [self.waiting.pop() for _ in range(min(count, len(self.waiting)))]
        for request in new:
            request.slot = free.pop(int(self.rng.integers(len(free))))
            request.table = self.lab.table(request.slot)
        if new:
            self.active += new
            run = self._run(new, right=0)
            run.admit()
            self.state = run.prefill(int(self.rng.integers(1, 33))).state

    def round(self) -> None:
        """Some of the active ones, at a random width, with a drafter right for a random number of tokens."""
        running = [request for request in self.active if not request.finish]
        if running:
            chosen = self.rng.permutation(len(running))[: self.rng.integers(1, len(running) + 1)]
            width, right = int(self.rng.choice(WIDTHS)), int(self.rng.integers(0, 8))
            run = self._run([running[i] for i in chosen], right)
            if self.rng.random() < 0.3:
                run.state = poisoned(self.lab, run.state, self.active)
            self.state = run.round(width).state
            for request in run.requests:
                assert request.accepted[-1] == min(right + 1, width) or request.finish
        self.done += [request for request in self.active if request.finish]
        self.active = [request for request in self.active if not request.finish]


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_gives_the_plain_text(seed: int):
    schedule = Schedule(seed)
    while schedule.waiting or schedule.active:
        schedule.arrive()
        schedule.round()
    assert len(schedule.done) == 12
    for request in schedule.done:
        assert request.finish == LENGTH and len(request.tokens) == request.limit - len(request.prompt)
        assert request.tokens == truth(request.prompt, len(request.tokens))
