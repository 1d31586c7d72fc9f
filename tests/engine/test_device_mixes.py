"""Random mixes over real models: whatever goes on, a request's tokens and acceptance are those of its solo run.

Waves of 2 to 40 requests with prompts of 1 to 600 tokens, limits of 1 to 80, stop tokens, aborts, priorities, too few
pages, shared prefixes and next turns, with and without overlap, prefix cache and drafts.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import dataclass

import pytest

from dflash_jax.engine.pages import pages_for
from dflash_jax.engine.request import Request

from .bank import NEW, Known, make_bank
from .device import V1, V2, Device, explain, greedy, open_device, perturbed, solo
from .fake_runner import assert_nothing_leaks

TALLY: Counter[str] = Counter()


@dataclass
class Client:
    """A request, what it must give, and when it comes and goes; steps of the engine."""

    known: Known
    new: int
    stop_ids: tuple[int, ...]
    arrives: int
    aborts: int | None
    priority: int
    request: Request | None = None
    streamed: tuple[int, ...] = ()


class Mix:
    """One seed's engine and clients."""

    def __init__(self, device: Device, bank: list[Known], seed: int):
        self.device = device
        self.rng = rng = random.Random(seed)
        wave = rng.choice((1, 1, 20, 100))
        number = rng.choice((2, 3, 5, 8, 8, 15, 40))
        some = rng.sample(bank, min(len(bank), rng.choice((3, 10, 40))))
        self.clients = [self._client(rng.choice(some), wave) for _ in range(number)]
        self.engine = device.engine(
            num_pages=self._pages(),
            overlap=rng.random() < 0.6,
            enable_prefix_caching=rng.random() < 0.75,
            max_running_requests=rng.choice((1, device.sizes.num_slots, device.sizes.num_slots)),
            chunked_prefill_size=rng.choice((5, device.sizes.prefill_chunk, device.sizes.prefill_chunk)),
        )

    def _client(self, known: Known, wave: int) -> Client:
        rng = self.rng
        new = rng.choice((1, 2, 5, 12, 30, NEW))
        stop_ids = tuple({rng.choice(known.tokens) for _ in range(rng.choice((0, 0, 0, 1, 2)))})
        aborts = rng.randrange(60) if rng.random() < 0.15 else None
        return Client(known, new, stop_ids, rng.randrange(wave), aborts, rng.choice((0, 0, 0, 1)))

    def _pages(self) -> int:
        size = self.device.sizes.page_size
        longest = max(len(client.known.prompt) + client.new for client in self.clients)
        slack = self.rng.choice((0, 1, 4, 10, 30, 1000))
        return min(1 + pages_for(longest, size) + slack, self.device.sizes.num_pages)

    def serve(self) -> None:
        for step in range(20_000):
            for client in self.clients:
                self._turn(client, step)
            for update in self.engine.step():
                client = self.clients[int(update.request.request_id)]
                client.streamed += tuple(update.tokens)
            if step > 160 and not self.engine.has_work:
                return
        raise AssertionError(f"not done: {self.engine.metrics()}")

    def _turn(self, client: Client, step: int) -> None:
        if client.arrives == step:
            name = str(self.clients.index(client))
            params = greedy(client.new, stop_token_ids=client.stop_ids)
            client.request = self.engine.add_request(
                client.known.prompt, params, request_id=name, priority=client.priority
            )
        if client.request and client.aborts is not None and client.arrives + client.aborts == step:
            phase = client.request.phase.value
            if self.engine.abort(client.request.request_id):
                TALLY["aborted " + phase] += 1

    def check(self) -> None:
        for client in self.clients:
            self._check_client(client)
        found = self.engine.metrics()
        assert sum(found.request_success.values()) == len(self.clients)
        assert_nothing_leaks(self.engine._loop)
        TALLY["requests"] += len(self.clients)
        TALLY["preemptions"] += found.num_preemptions
        TALLY["hit tokens"] += found.prefix_cache_hits

    def _check_client(self, client: Client) -> None:
        request = client.request
        assert request and list(client.streamed) == request.output_ids
        tokens, accepted, reason = client.known.cut(client.new, client.stop_ids)
        if request.finish_reason == "abort":
            tokens = tokens[: len(request.output_ids)]
        else:
            assert request.finish_reason == reason
        assert request.output_ids == tokens, explain(self.device, client.known.prompt, tokens, request.output_ids)
        if request.preemptions:
            TALLY["preempted"] += 1
            return
        whole = request.finish_reason != "abort"
        same = request.accept_lengths == (accepted if whole else accepted[: len(request.accept_lengths)])
        assert same, self._explain_acceptance(client, request)
        TALLY["acceptance compared"] += 1

    def _explain_acceptance(self, client: Client, request: Request) -> str:
        runs = []
        for noise in range(4):
            with self.device.weighing(perturbed(self.device.weights, noise)):
                runs.append(solo(self.device, client.known.prompt, greedy(NEW)).accept_lengths)
        sure = all(run == client.known.accepted for run in runs)
        told = "does not change" if sure else "changes"
        return f"{request.accept_lengths} for {client.known.accepted}, which exaggerated rounding {told}"


def run_mixes(device: Device, bank: list[Known], seeds: range) -> None:
    for seed in seeds:
        try:
            mix = Mix(device, bank, seed)
            mix.serve()
            mix.check()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@functools.cache
def bank_of(pair: str, draft: str | None, size: int) -> list[Known]:
    return make_bank(open_device(pair, draft), size)


@pytest.mark.parametrize("pair", [V1, V2])
def test_some_mixes(pair: str) -> None:
    run_mixes(open_device(pair), bank_of(pair, None, 16), range(8))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("pair", "draft"), [(V1, None), (V2, None), ("llama-v2-window", None), (V1, "none"), (V2, "ngram")],
    ids=["v1", "v2", "v2 window", "none", "ngram"],
)  # fmt: skip
def test_many_mixes(pair: str, draft: str | None) -> None:
    """Two hundred in all, and again."""
    run_mixes(open_device(pair, draft), bank_of(pair, draft, 100), range(1000, 1050))


@pytest.mark.soak
def test_the_mixes_met_what_they_are_for() -> None:
    """Runs after the mixes above; alone it makes its own."""
    if TALLY["requests"] < 500:
        run_mixes(open_device(V2), bank_of(V2, None, 100), range(2000, 2050))
    for event in ("aborted waiting", "aborted prefilling", "aborted running", "preempted", "hit tokens"):
        assert TALLY[event] > 0, f"no {event} in {dict(TALLY)}"
    assert TALLY["acceptance compared"] > TALLY["requests"] / 2
