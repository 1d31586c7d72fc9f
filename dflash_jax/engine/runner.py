"""The device side of the engine: state, compiled steps and buckets behind the `Runner` protocol.

Launches return at once; results come back in one packed array each, whose copy to the host starts with the
launch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dflash_jax.drafters import Weights
from dflash_jax.engine.protocol import PrefillRow, RowResult
from dflash_jax.errors import UserError
from dflash_jax.models import FILTER, GREEDY, SAMPLE
from dflash_jax.ops import BROKEN, LENGTH, RUNNING, STOP, SamplingRows
from dflash_jax.params import tree_bytes
from dflash_jax.sampling import SamplingParams
from dflash_jax.state import MAX_STOP_IDS, DecodeState
from dflash_jax.steps import Admission, PrefillBatch, Steps

log = logging.getLogger("dflash_jax")
MODES = (GREEDY, SAMPLE, FILTER)  # each serves what the ones before it do
REASONS = {RUNNING: None, STOP: "stop", LENGTH: "length", BROKEN: "error"}
SMALLEST_PREFILL = 16
UPDATE_BUCKETS = (8, 64, 512)  # rows of one `extend` call


def bucket(n: int, largest: int, smallest: int = 1) -> int:
    """The power of two that holds n, between `smallest` and `largest` (which need not be one)."""
    size = smallest
    while size < n:
        size *= 2
    return min(size, largest)


def buckets(largest: int, smallest: int = 1) -> list[int]:
    """All values `bucket` can take."""
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= 2
    return [*sizes, largest]


def prefill_buckets(max_rows: int, chunk: int) -> list[tuple[int, int]]:
    """(rows, width) that a launch of up to `max_rows` rows, together no wider than `chunk` tokens, can have."""
    rows, widths = buckets(max_rows), buckets(chunk, min(SMALLEST_PREFILL, chunk))
    fewest = dict(zip(rows, [1, *(n + 1 for n in rows)], strict=False))
    narrowest = dict(zip(widths, [1, *(n + 1 for n in widths)], strict=False))
    return [(n, width) for n in rows for width in widths if n == 1 or fewest[n] * narrowest[width] <= chunk]


@dataclass(frozen=True)
class RunnerSizes:
    """Shapes of the device state; tokens, pages, slots."""

    num_slots: int
    page_size: int
    num_pages: int
    pages_per_slot: int
    block_size: int
    prefill_chunk: int
    max_prefill_rows: int


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on the device.  scratch: the most that a step compiled so far needs beside these; None before the first."""

    target: int
    draft: int
    target_kv: int
    draft_state: int
    scratch: int | None

    def __str__(self) -> str:
        scratch = "unknown until a step is compiled" if self.scratch is None else _mb(self.scratch)
        return (
            f"memory: target {_mb(self.target)}, draft {_mb(self.draft)}, target KV {_mb(self.target_kv)},"
            f" draft state {_mb(self.draft_state)}, scratch {scratch}"
        )


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


@dataclass
class PackedResult:
    """A launch's packed array on its way to the host: rows int32 [S, ≥ 2] = (count, finish, tokens …)."""

    packed: jax.Array
    rows: int

    def result(self) -> list[RowResult]:
        """Waits for the copy."""
        host = np.asarray(self.packed)[: self.rows].tolist()
        return [RowResult(row[2 : 2 + row[0]], REASONS[row[1]]) for row in host]


@dataclass
class DeviceRunner:
    """Owns the state and launches steps in order.  `compile_s` adds up the time of first launches by bucket."""

    steps: Steps
    weights: Weights
    state: DecodeState
    sizes: RunnerSizes
    compile_s: float = 0.0
    scratch_bytes: int | None = None
    _seen: set[tuple[Any, ...]] = field(default_factory=set)
    _modes: dict[int, str] = field(default_factory=dict)  # of slots whose request samples
    _slot_arrays: dict[tuple[int, ...], jax.Array] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        return self.sizes.num_slots

    @property
    def page_size(self) -> int:
        return self.sizes.page_size

    @property
    def num_pages(self) -> int:
        return self.sizes.num_pages

    @property
    def pages_per_slot(self) -> int:
        return self.sizes.pages_per_slot

    @property
    def block_size(self) -> int:
        return self.sizes.block_size

    @property
    def prefill_chunk(self) -> int:
        return self.sizes.prefill_chunk

    @property
    def max_prefill_rows(self) -> int:
        return self.sizes.max_prefill_rows

    @property
    def memory(self) -> MemoryUse:
        weights, state = self.weights, self.state
        parts = (tree_bytes(part) for part in (weights.target, weights.draft, state.kv, state.draft))
        return MemoryUse(*parts, scratch=self.scratch_bytes)

    # -- launches ------------------------------------------------------------------------------------------------

    def admit(
        self,
        slot: int,
        *,
        prompt_len: int,
        limit_tokens: int,
        pages: Sequence[int],
        stop_ids: Sequence[int],
        sampling: object,
    ) -> None:
        if len(stop_ids) > MAX_STOP_IDS:
            raise UserError(f"a request may name {MAX_STOP_IDS} stop token ids, not {len(stop_ids)}")
        table = np.zeros((1, self.pages_per_slot), np.int32)
        table[0, : len(pages)] = pages
        stops = np.full((1, MAX_STOP_IDS), -1, np.int32)
        stops[0, : len(stop_ids)] = stop_ids
        rows, self._modes[slot] = sampling_rows(sampling), sampling_mode(sampling)
        new = Admission(np.array([slot], np.int32), np.array([limit_tokens], np.int32), stops, table, rows)  # type: ignore[arg-type]
        self.state = self.steps.admit(self.state, new)

    def extend(self, updates: Sequence[tuple[int, int, int]]) -> None:
        largest = UPDATE_BUCKETS[-1]
        for at in range(0, len(updates), largest):
            part = updates[at : at + largest]
            size = next(size for size in UPDATE_BUCKETS if size >= len(part))
            rows = np.zeros((size, 3), np.int32)
            rows[:, 0] = self.num_slots  # spare rows write the padding page to the padding slot
            rows[: len(part)] = part
            self.state = self.steps.extend(self.state, rows)

    def prefill(self, rows: Sequence[PrefillRow]) -> PackedResult:
        width = bucket(max(len(row.tokens) for row in rows), self.prefill_chunk, SMALLEST_PREFILL)
        size = bucket(len(rows), self.max_prefill_rows)
        mode = self._mode(row.slot for row in rows if row.last)  # other chunks choose no token
        return self._prefill(prefill_batch(rows, size, width, spare_slot=self.num_slots), len(rows), mode)

    def _prefill(self, batch: PrefillBatch, rows: int, mode: str) -> PackedResult:
        key = _launch_key("prefill", *batch.tokens.shape, mode=mode)
        return self._launch(key, self.steps.prefill, (self.weights,), batch, rows, mode)

    def decode(self, slots: Sequence[int], block_size: int) -> PackedResult:
        key, before = self.decode_key(slots, block_size), (block_size, self.weights)
        where = self._slots(slots, bucket(len(slots), self.num_slots))
        return self._launch(key, self.steps.decode_round, before, where, len(slots), self._mode(slots))

    def decode_key(self, slots: Sequence[int], block_size: int) -> tuple[Any, ...]:
        """What a round of these slots is compiled for."""
        return _launch_key("decode_round", bucket(len(slots), self.num_slots), block_size, mode=self._mode(slots))

    def is_compiled(self, key: Sequence[Any]) -> bool:
        """Whether there was a launch of that key, so that the next one compiles nothing."""
        return key in self._seen

    def finish(self, slots: Sequence[int]) -> None:
        self.state = self.steps.finish(self.state, self._slots(slots, self.num_slots))

    def _mode(self, slots: Iterable[int]) -> str:
        """What the neediest of these slots needs."""
        return max((self._modes.get(slot, GREEDY) for slot in slots), key=MODES.index, default=GREEDY)

    def _slots(self, slots: Sequence[int], size: int) -> jax.Array:
        """`slots` padded with the padding slot, on the device; the last few batches are kept there."""
        key = (*slots, *[self.num_slots] * (size - len(slots)))
        if key not in self._slot_arrays:
            if len(self._slot_arrays) >= 64:
                self._slot_arrays.clear()
            self._slot_arrays[key] = jax.device_put(np.array(key, np.int32))
        return self._slot_arrays[key]

    def _launch(
        self,
        key: tuple[Any, ...],
        step: Any,
        before: tuple[Any, ...],
        what: PrefillBatch | jax.Array,
        rows: int,
        mode: str,
    ) -> PackedResult:
        """`step(*before, state, what, mode=mode)`."""
        start_s = time.perf_counter()
        self.state, packed = step(*before, self.state, what, mode=mode)
        packed.copy_to_host_async()
        if key not in self._seen:  # the first call of a bucket traces and compiles before it returns
            self._seen.add(key)
            took_s = time.perf_counter() - start_s
            self._note_compiled(key, step.lower(*before, self.state, what, mode=mode).compile(), took_s)
        return PackedResult(packed, rows)

    def _note_compiled(self, key: tuple[Any, ...], compiled: Any, took_s: float) -> None:
        """Count time and scratch of a new step; `lower` and `compile` have found what the call had made."""
        self.compile_s += took_s
        analysis = compiled.memory_analysis()
        scratch = analysis.temp_size_in_bytes if analysis else 0
        self.scratch_bytes = max(self.scratch_bytes or 0, scratch)
        log.info("%s: ready in %.1f s, scratch %s", " ".join(map(str, key)), took_s, _mb(scratch))

    # -- warm-up -------------------------------------------------------------------------------------------------

    def warmup_calls(self, block_sizes: Sequence[int]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """(label, call) for each bucket; a call runs the step on padding rows only, which changes nothing.

        Prefill rows times their width never exceed the chunk, which leaves some pairs of buckets unused.
        """
        for spare in self.spare_batches():
            size = len(spare)
            for block in block_sizes:
                yield f"decode {size}×{block}", lambda spare=spare, block=block: self.decode(spare, block)
        for size, width in prefill_buckets(self.max_prefill_rows, self.prefill_chunk):
            yield f"prefill {size}×{width}", lambda size=size, width=width: self._warm_prefill(size, width)

    def spare_batches(self) -> list[list[int]]:
        """Padding slots for a round of each bucket."""
        return [[self.num_slots] * size for size in buckets(self.num_slots)]

    def _warm_prefill(self, size: int, width: int) -> PackedResult:
        return self._prefill(prefill_batch([], size, width, spare_slot=self.num_slots), 0, GREEDY)


def _launch_key(*parts: Any, mode: str) -> tuple[Any, ...]:
    return parts if mode == GREEDY else (*parts, mode)


def sampling_mode(params: object) -> str:
    """What a request needs of a step; anything but `SamplingParams` is greedy."""
    if not isinstance(params, SamplingParams) or params.greedy:
        return GREEDY
    return FILTER if params.top_k > 0 or params.top_p < 1 or params.min_p > 0 else SAMPLE


def sampling_rows(params: object) -> SamplingRows:
    """One request's parameters as the device keeps them (arrays of one row)."""
    asked = params if isinstance(params, SamplingParams) else SamplingParams()
    seed = np.uint64((asked.seed or 0) % 2**64)
    return SamplingRows(  # type: ignore[arg-type]
        temperature=np.array([0 if asked.greedy else asked.temperature], np.float32),
        min_p=np.array([asked.min_p], np.float32),
        top_k=np.array([max(asked.top_k, 0)], np.int32),
        top_p=np.array([asked.top_p], np.float32),
        seed=np.array([[seed & np.uint64(0xFFFFFFFF), seed >> np.uint64(32)]], np.uint32),
    )


def prefill_batch(rows: Sequence[PrefillRow], size: int, width: int, spare_slot: int) -> PrefillBatch:
    """Rows padded to [size, width]; spare rows have no tokens and belong to `spare_slot`."""
    tokens = np.zeros((size, width), np.int32)
    slots = np.full(size, spare_slot, np.int32)
    start, length, last = np.zeros(size, np.int32), np.zeros(size, np.int32), np.zeros(size, bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = row.tokens
        slots[i], start[i], length[i], last[i] = row.slot, row.start, len(row.tokens), row.last
    return PrefillBatch(tokens, slots, start, length, last)  # type: ignore[arg-type]
