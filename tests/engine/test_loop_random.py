"""Random mixes over the fake device: whatever happens around it, a request's tokens are those of its solo run."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from dflash_jax.engine.loop import Loop, Update
from dflash_jax.engine.pages import pages_for
from dflash_jax.engine.request import Request

from .fake_runner import FakeRunner, Script, Solo, assert_nothing_leaks, make_loop, make_request, solo_run

RUNS, GROUPS = 300, 10
TABLE_TOKENS = 96
TALLY: Counter[str] = Counter()


@dataclass
class Client:
    """A request, what it must give, and when it comes and goes; steps of the loop."""

    request: Request
    solo: Solo
    arrives: int
    aborts: int | None
    stop_pair: tuple[int, int] | None
    streamed: list[int]

    @property
    def breaks(self) -> bool:
        """Whether the solo run gets as far as the token whose computation fails."""
        script = self.request.sampling
        assert isinstance(script, Script)
        return script.breaks_at is not None and script.breaks_at < len(script.prompt) + len(self.solo.tokens)


class Mix:
    """One seed's engine and clients."""

    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        self.block_size = rng.choice([1, 2, 3, 4, 8])
        self.page_size = rng.choice([1, 2, 4, 8, 16])
        self.fixed_width = rng.random() < 0.7
        bases = [[rng.randrange(40) for _ in range(rng.choice([8, 24, 48]))] for _ in range(2)]
        wave = rng.choice([1, 10, 60])
        number = rng.choice([2, 3, 5, 8, 8, 15, 40])
        self.clients = [self._client(str(i), bases, wave) for i in range(number)]
        self.by_id = {client.request.request_id: client for client in self.clients}
        self.loop = self._engine()

    def _client(self, name: str, bases: list[list[int]], wave: int) -> Client:
        rng = self.rng
        head = rng.choice(bases)[: rng.choice([0, 5, 16, 48])]
        prompt = head + [rng.randrange(40) for _ in range(rng.choice([1, 1, 2, 9, 30]))]
        script = Script(prompt, [rng.randrange(self.block_size + 1) for _ in range(rng.choice([1, 3, 7]))])
        new = rng.choice([1, 2, 5, 12, 30, 200])
        stop_ids = [rng.randrange(40) for _ in range(rng.choice([0, 0, 1, 2]))]
        text = script.truth.upto(len(prompt) + 40).tokens[len(prompt) :]
        place = rng.randrange(30)
        pair = (text[place], text[place + 1]) if rng.random() < 0.2 else None
        solo = solo_run(
            script, new, block_size=self.block_size, stop_ids=stop_ids, max_model_len=TABLE_TOKENS, stop_pair=pair
        )
        if pair is None and rng.random() < 0.05:
            script.breaks_at = len(prompt) + rng.randrange(20)
        ignore = rng.random() < 0.5
        request = make_request(
            name,
            script,
            new,
            stop_token_ids=stop_ids,
            eos_token_ids=range(40) if ignore else stop_ids,
            ignore_eos=ignore,
            priority=rng.choice([0, 0, 0, 1]),
            cache_salt=rng.choice([None, None, "other"]),
        )
        aborts = rng.randrange(50) if rng.random() < 0.15 else None
        return Client(request, solo, rng.randrange(wave), aborts, pair, [])

    def _engine(self) -> Loop:
        rng, size = self.rng, self.page_size
        longest = max(min(len(c.request.prompt_ids) + c.request.max_new_tokens, TABLE_TOKENS) for c in self.clients)
        slack = rng.choice([0, 1, 3, 10, 100])
        chunk = rng.choice([3, 16, 64])
        runner = FakeRunner(
            num_slots=rng.choice([1, 2, 4, 8, 16]),
            page_size=size,
            num_pages=1 + pages_for(longest, size) + pages_for(slack * 8, size),
            pages_per_slot=TABLE_TOKENS // size,
            block_size=self.block_size,
            prefill_chunk=chunk,
            max_prefill_rows=rng.choice([1, 3]),
            rng=rng if rng.random() < 0.5 else None,
        )
        limits = {
            "enable_prefix_caching": rng.random() < 0.8,
            "chunked_prefill_size": rng.choice([None, 2, chunk * 2]),
        }
        choose = None if self.fixed_width else lambda live: rng.randrange(1, self.block_size + 1)
        overlap = rng.random() < 0.6
        return make_loop(runner, limits=limits, overlap=overlap, on_tokens=self._on_tokens, choose_block=choose)

    def _on_tokens(self, request: Request, tokens) -> bool:
        out, pair = request.output_ids, self.by_id[request.request_id].stop_pair
        for end in range(len(out) - len(tokens), len(out)):
            if end and (out[end - 1], out[end]) == pair:
                request.drop_tail(len(out) - end - 1)
                return True
        return False

    def serve(self) -> None:
        for step in range(20_000):
            for client in self.clients:
                if client.arrives == step:
                    self.loop.add(client.request)
                if client.aborts is not None and client.arrives + client.aborts == step:
                    phase = client.request.phase.value
                    if self.loop.abort(client.request.request_id):
                        TALLY["aborted " + phase] += 1
            self._collect(self.loop.step())
            if step % 4 == 0:
                self.loop.scheduler.integrity()
            if step > 60 and not self.loop.has_work:
                return
        raise AssertionError(f"not done: {self.loop.metrics()}")

    def _collect(self, updates: list[Update]) -> None:
        for update in updates:
            self.by_id[update.request.request_id].streamed += update.tokens

    def check(self) -> None:
        for client in self.clients:
            self._check_client(client)
        metrics = self.loop.metrics()
        assert metrics.generation_tokens == sum(len(client.request.output_ids) for client in self.clients)
        assert sum(metrics.request_success.values()) == len(self.clients)
        assert_nothing_leaks(self.loop)
        TALLY["preemptions"] += metrics.num_preemptions
        TALLY["hit tokens"] += metrics.prefix_cache_hits
        TALLY["requests"] += len(self.clients)

    def _check_client(self, client: Client) -> None:
        request, solo = client.request, client.solo
        assert client.streamed == request.output_ids
        assert sum(request.accept_lengths) <= max(0, len(request.output_ids) - 1)
        if request.finish_reason == "abort" or client.breaks:
            TALLY[f"ended by {request.finish_reason}"] += 1
            assert request.finish_reason in ("abort", "error")
            assert request.output_ids == solo.tokens[: len(request.output_ids)]
            return
        assert (request.output_ids, request.finish_reason) == (solo.tokens, solo.finish_reason)
        assert len(request.output_ids) - sum(request.accept_lengths) <= 1 + request.preemptions
        if self.fixed_width and not request.preemptions:
            assert request.accept_lengths == solo.accept_lengths
            TALLY["acceptance compared"] += 1


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_mixes(group):
    for seed in range(group * RUNS // GROUPS, (group + 1) * RUNS // GROUPS):
        try:
            mix = Mix(seed)
            mix.serve()
            mix.check()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_the_mixes_met_what_they_are_for():
    """Runs after the mixes above; alone it makes its own."""
    if not TALLY:
        test_random_mixes(0)
    for event in (
        "aborted waiting",
        "aborted prefilling",
        "aborted running",
        "ended by error",
        "preemptions",
        "hit tokens",
    ):
        assert TALLY[event] > 0, f"no {event} in {dict(TALLY)}"
    assert TALLY["acceptance compared"] > TALLY["requests"] / 10
