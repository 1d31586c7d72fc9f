"""How wide the next round is: the width that gives the most tokens per second, by what was measured.

A wide block costs time whatever becomes of it: the draft's pass, and a target pass over more rows, which is nearly free
for one request on a GPU and anything but free on a CPU or with many requests.  Whether that pays depends on how much is
accepted lately.  Plain Python, no JAX; the output never depends on any of this.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dflash_jax.engine.loop import Round
from dflash_jax.engine.protocol import Pending
from dflash_jax.engine.request import Request
from dflash_jax.engine.round_times import Key, RoundTimes

EVIDENCE_ROUNDS = 16  # rounds of the full width before any other is considered
EVIDENCE_ROWS = 8  # rows of a width before its own acceptance counts rather than that of a wider one
WINDOW_ROWS = 64  # rows over which acceptance is averaged, roughly
GAIN = 1.05  # a change must promise this much
MEASURED_ROUNDS = 3  # of each at warm-up
PROBE_ROUNDS = 4  # rounds of a trial; with overlap, two of them have neighbours alike and are timed
PROBE_SPACING = 64  # rounds between two trials, at least
PROBE_SHARE = 0.03  # of the time may be lost to trials
ANY_EVERY = 8  # trials: then one of a width of which nothing good is known
LIKELY = 1.5  # a trial is likely to pay if the width would win by being so much faster than is known of it
UNLIKELY_PRICE = 4.0  # others wait until they may lose so many times more


def block_widths(largest: int) -> tuple[int, ...]:
    """The few widths that are compiled, ascending: 1 (no draft), and `largest` halved down to 4.

    Each costs a compilation per bucket.  Between neighbours the best width loses a few per cent at most; 2 and 3 are
    left out because they pay only where 1 or 4 do nearly as well (on CPU width 2 takes 1.5 times the time of 1).
    """
    widths = [largest]
    while widths[-1] // 2 >= 4:
        widths.append(widths[-1] // 2)
    return tuple(sorted({1, *widths}))


class TokensPerRound:
    """Recent mean of the tokens that a row commits in a round, for each width in use."""

    def __init__(self, widths: Sequence[int]):
        self._widths = widths
        self._rows = dict.fromkeys(widths, 0)
        # [width][n]: what rows of that width commit, as if cut to n; so it tells of the narrower widths too.
        self._means = {width: {n: 1.0 for n in widths if n <= width} for width in widths}

    def add(self, width: int, committed: Sequence[int]) -> None:
        """A round of that width committed so many tokens for each of its requests."""
        means, rows = self._means[width], len(committed)
        weight = rows / (self._rows[width] + rows)
        for n in means:
            mean = sum(count if count < n else n for count in committed) / rows
            means[n] += weight * (mean - means[n])
        self._rows[width] = min(self._rows[width] + rows, WINDOW_ROWS)

    def expected(self, width: int) -> float:
        """Tokens of a row in a round of that width, by its own record or that of the next wider width that has one."""
        enough = width == 1 or self._rows[width] >= EVIDENCE_ROWS
        for wider in [width] if enough else [w for w in self._widths if w > width]:
            if self._rows[wider]:
                return self._means[wider][width]
        return self._means[width][width]

    def distrust(self, width: int) -> None:
        """What is known of this width is old: a few new rows shall outweigh it, and narrower ones follow it."""
        self._rows[width] = min(self._rows[width], PROBE_ROUNDS)
        for narrower in self._widths:
            if narrower < width:
                self._rows[narrower] = 0


@dataclass(frozen=True)
class SpeculationStats:
    """A snapshot.  By width: rounds launched, and recent tokens that a row commits; round_s by compiled round."""

    width: int
    rounds: dict[int, int]
    tokens_per_round: dict[int, float]
    round_s: dict[str, float]
    trials: int


class Speculation:
    """Chooses widths among those that are compiled; `choose` and `observe` are the loop's two hooks.

    key_of(slots, width, masked) names the compiled round that would run, masked where a request has a grammar;
    is_compiled(key): nothing is compiled on its account.
    It stays at the full width until EVIDENCE_ROUNDS rounds of it have been seen and another width is compiled and
    measured, so an engine that was not warmed up never leaves it.  From time to time it tries another width for a few
    rounds, since times and acceptance change; what that loses is bounded by PROBE_SHARE.
    """

    def __init__(
        self,
        largest: int,
        key_of: Callable[[Sequence[int], int, bool], Key],
        is_compiled: Callable[[Key], bool],
        times: RoundTimes | None = None,
    ):
        self.widths = block_widths(largest)
        self.times = times or RoundTimes()
        self.tokens = TokensPerRound(self.widths)
        self._key_of = key_of
        self._is_compiled = is_compiled
        self._launched: deque[tuple[Key, int]] = deque()  # not read yet
        self._rounds = dict.fromkeys(self.widths, 0)
        self._width = largest  # the choice, trials aside
        self._trial: tuple[int, int] = (largest, 0)  # a width, and rounds of it still to go
        self._trials = 0
        self._since_trial = 0
        self._allowance_s = 0.0  # what the next trial may lose

    @property
    def largest(self) -> int:
        return self.widths[-1]

    def stats(self) -> SpeculationStats:
        tokens = {width: self.tokens.expected(width) for width in self.widths}
        return SpeculationStats(self._width, dict(self._rounds), tokens, self.times.all(), self._trials)

    # -- the loop's hooks ----------------------------------------------------------------------------------------------

    def choose(self, live: Sequence[Request]) -> int:
        """The width of the next round of these requests."""
        slots = [request.seat.slot for request in live if request.seat]
        masked = any(request.grammar for request in live)
        keys = {width: self._key_of(slots, width, masked) for width in self.widths}
        width = self._choose(keys)
        self._rounds[width] += 1
        self._launched.append((keys[width], width))
        return width

    def observe(self, report: Round) -> None:
        """A round was read; rounds come in the order in which they were chosen."""
        key, width = self._launched.popleft()
        if report.steady:
            self.times.add(key, report.took_s)
        if report.committed:
            self.tokens.add(width, report.committed)

    # -- warm-up -------------------------------------------------------------------------------------------------------

    def measure(self, decode: Callable[[Sequence[int], int], Pending], batches: Iterable[Sequence[int]]) -> None:
        """Time every compiled round that has never been timed, on batches of padding slots, and keep the times."""
        for slots in batches:
            for width in self.widths:
                key = self._key_of(slots, width, False)
                if self._is_compiled(key) and self.times.seconds(key) is None:
                    for _ in range(MEASURED_ROUNDS):
                        start_s = time.perf_counter()
                        decode(slots, width).result()
                        self.times.add(key, time.perf_counter() - start_s)
        self.times.save()

    # -- the choice ----------------------------------------------------------------------------------------------------

    def _choose(self, keys: dict[int, Key]) -> int:
        known = {w: s for w, key in keys.items() if self._is_compiled(key) and (s := self.times.seconds(key))}
        enough = self._rounds[self.largest] >= EVIDENCE_ROUNDS
        if not enough or self.largest not in known or len(known) == 1:
            return self.largest
        rates = {width: self.tokens.expected(width) / seconds for width, seconds in known.items()}
        best = max(rates, key=rates.__getitem__)
        if self._width not in rates or rates[best] > GAIN * rates[self._width]:
            self._width = best
        return self._try(keys, known, rates) or self._width

    def _try(self, keys: dict[int, Key], known: dict[int, float], rates: dict[int, float]) -> int | None:
        """The width of a trial that is on or begins now."""
        width, left = self._trial
        if left and width in known:
            self._trial = width, left - 1
            return width
        self._since_trial += 1
        self._allowance_s += PROBE_SHARE * known[self._width]
        width = self._candidate(rates)
        loss_s = PROBE_ROUNDS * (known[width] - self.tokens.expected(width) / rates[self._width])
        hope = self.largest / known[width] if width == self.largest else rates[width]  # acceptance may have changed
        price_s = loss_s * (1 if LIKELY * hope > rates[self._width] else UNLIKELY_PRICE)
        if self._since_trial < PROBE_SPACING or price_s > self._allowance_s:
            return None
        self._begin_trial(width, keys[width])
        return width

    def _candidate(self, rates: dict[int, float]) -> int:
        """What to try next: the full width, which tells of acceptance, or the best of the others; at times any."""
        others = sorted((width for width in rates if width != self._width), key=rates.__getitem__)
        if self._trials % ANY_EVERY == ANY_EVERY - 1:
            return others[self._trials // ANY_EVERY % len(others)]
        likely = LIKELY * rates[others[-1]] > rates[self._width]
        if self._width != self.largest and (self._trials % 2 == 0 or not likely):
            return self.largest
        return others[-1]

    def _begin_trial(self, width: int, key: Key) -> None:
        self._trial = width, PROBE_ROUNDS - 1
        self._trials += 1
        self._since_trial = 0
        self._allowance_s = 0.0
        self.times.distrust(key, keep=1)
        self.tokens.distrust(width)
