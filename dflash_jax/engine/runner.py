"""The device side of the engine: state, compiled steps and buckets behind the `Runner` protocol.

Launches return at once; results come back in one packed array each, whose copy to the host starts with the
launch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from dflash_jax.drafters import Weights
from dflash_jax.engine.packing import (
    SMALLEST_PREFILL,
    Arrival,
    admission,
    all_masks,
    bucket,
    buckets,
    combined,
    edit_row,
    in_buckets,
    needs_of,
    prefill_batch,
    prefill_buckets,
    table_updates,
    unpack_logprobs,
)
from dflash_jax.engine.protocol import PrefillRow, RowResult
from dflash_jax.ops import BROKEN, LENGTH, RUNNING, STOP
from dflash_jax.params import device_bytes
from dflash_jax.state import DecodeState, Needs
from dflash_jax.steps import NOTHING, Admission, PrefillBatch, Steps, Verified

log = logging.getLogger("dflash_jax")
REASONS = {RUNNING: None, STOP: "stop", LENGTH: "length", BROKEN: "error"}
UPDATE_BUCKETS = (8, 64, 512)  # rows of one `extend` call
ADMISSION_BUCKETS = (1, 8)  # rows of one `admit` call


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
    min_batch: int = 1


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on each device.  edits: what requests may change in their logits; scratch: the most that a step compiled so
    far needs beside all that; None before the first."""

    target: int
    draft: int
    target_kv: int
    draft_state: int
    edits: int
    scratch: int | None

    def __str__(self) -> str:
        scratch = "unknown until a step is compiled" if self.scratch is None else _mb(self.scratch)
        return (
            f"memory: target {_mb(self.target)}, draft {_mb(self.draft)}, target KV {_mb(self.target_kv)},"
            f" draft state {_mb(self.draft_state)}, penalties and biases {_mb(self.edits)}, scratch {scratch}"
        )


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


@dataclass
class PackedResult:
    """A launch's packed array on its way to the host.

    Rows int32 [S, …] = count, finish, `block` tokens; then their log-probabilities and those of the tokens after each
    of `chunk` prompt tokens, where needed.
    """

    packed: jax.Array
    rows: int
    block: int
    chunk: int = 0
    needs: Needs = NOTHING

    def result(self) -> list[RowResult]:
        """Waits for the copy."""
        host = np.asarray(self.packed)[: self.rows]
        results = [RowResult(row[2 : 2 + row[0]], REASONS[row[1]]) for row in host[:, : 2 + self.block].tolist()]
        at = 2 + self.block
        if (n := self.needs.logprobs) is not None:
            end = at + self.block * (2 + 2 * n)
            for one, found in zip(results, unpack_logprobs(host[:, at:end], self.block, n), strict=True):
                one.logprobs = found[: len(one.tokens)]
            at = end
        if self.chunk and (n := self.needs.prompt_logprobs) is not None:
            for one, found in zip(results, unpack_logprobs(host[:, at:], self.chunk, n), strict=True):
                one.prompt_logprobs = found
        return results


@dataclass
class MaskedRound:
    """A round in three launches; the drafts are on their way to the host while they are verified."""

    runner: DeviceRunner
    slots: jax.Array
    verified: Verified
    rows: int
    needs: Needs

    def blocks(self) -> list[list[int]]:
        return np.asarray(self.verified.ids)[: self.rows].tolist()

    def accept(self, masks: Sequence[Any]) -> PackedResult:
        """uint32 [B, ⌈V / 32⌉] for each row; spare rows may have any token, which nobody reads."""
        size, block, vocab = self.verified.logits.shape
        spare = [None] * (size - self.rows)
        return self.runner.accept(self, all_masks([*masks, *spare], (block, -(-vocab // 32))))


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
    _arrivals: list[Arrival] = field(default_factory=list)
    _needs: dict[int, Needs] = field(default_factory=dict)  # of slots whose request is not plainly greedy
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
    def has_edits(self) -> bool:
        """Whether the state has room for what requests change in their logits."""
        return self.state.edits is not None

    @property
    def memory(self) -> MemoryUse:
        weights, state = self.weights, self.state
        parts = (device_bytes(part) for part in (weights.target, weights.draft, state.kv, state.draft, state.edits))
        return MemoryUse(*parts, scratch=self.scratch_bytes)

    # -- launches ------------------------------------------------------------------------------------------------

    def admit(
        self,
        slot: int,
        *,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        limit_tokens: int,
        pages: Sequence[int],
        stop_ids: Sequence[int],
        sampling: object,
    ) -> None:
        self._needs.pop(slot, None)
        if (needs := needs_of(sampling)) != NOTHING:
            self._needs[slot] = needs
        self._arrivals.append(Arrival(slot, limit_tokens, pages, stop_ids, sampling, prompt_ids, output_ids))

    def _admit_arrivals(self) -> None:
        """Tell the device of those admitted since it was last told of anything: one call for several."""
        arrivals, self._arrivals = self._arrivals, []
        for part, size in in_buckets(arrivals, ADMISSION_BUCKETS):
            self._update(("admit", size), self.steps.admit, self._admission(part, size))
        for arrival in arrivals:
            if self._needs.get(arrival.slot, NOTHING).edits:
                self._edit(arrival)

    def _edit(self, arrival: Arrival) -> None:
        assert self.state.edits is not None, "the engine refuses such requests"
        row = edit_row(arrival, self.state.edits.bias.shape[1])
        self._update(("edit",), self.steps.edit, np.array([arrival.slot], np.int32), row)

    def _admission(self, arrivals: Sequence[Arrival], size: int) -> Admission:
        return admission(arrivals, size, self.pages_per_slot, self.num_slots)

    def extend(self, updates: Sequence[tuple[int, int, int]]) -> None:
        self._admit_arrivals()
        for part, size in in_buckets(updates, UPDATE_BUCKETS):
            self._extend(part, size)

    def _extend(self, updates: Sequence[tuple[int, int, int]], size: int) -> None:
        self._update(("extend", size), self.steps.extend, table_updates(updates, size, self.num_slots))

    def prefill(self, rows: Sequence[PrefillRow]) -> PackedResult:
        width = self.prefill_width(max(len(row.tokens) for row in rows))
        size = bucket(len(rows), self.max_prefill_rows)
        return self._prefill(prefill_batch(rows, size, width, spare_slot=self.num_slots), len(rows), self._chunks(rows))

    def prefill_width(self, tokens: int) -> int:
        """The columns with which a chunk whose longest row has so many tokens is compiled."""
        return bucket(tokens, self.prefill_chunk, SMALLEST_PREFILL)

    def _chunks(self, rows: Sequence[PrefillRow]) -> Needs:
        """What these rows need: other chunks than the last choose no token."""
        if not self._needs:
            return NOTHING
        each = [(self._needs.get(row.slot, NOTHING), row.last) for row in rows]
        return combined(one if last else Needs(prompt_logprobs=one.prompt_logprobs) for one, last in each)

    def _prefill(self, batch: PrefillBatch, rows: int, needs: Needs) -> PackedResult:
        chunk, masked = batch.tokens.shape[1], [] if batch.allowed is None else ["masked"]
        key = _launch_key("prefill", *batch.tokens.shape, *masked, needs=needs)
        packed = self._launch(key, self.steps.prefill, (self.weights,), batch, needs=needs)
        return PackedResult(packed, rows, 1, chunk, needs)

    def decode(self, slots: Sequence[int], block_size: int) -> PackedResult:
        return self._decode(slots, block_size, self._all(slots))

    def _decode(self, slots: Sequence[int], block_size: int, needs: Needs) -> PackedResult:
        size, before = self._batch(len(slots)), (block_size, self.weights)
        key = _launch_key("decode_round", size, block_size, needs=needs)
        packed = self._launch(key, self.steps.decode_round, before, self._slots(slots, size), needs=needs)
        return PackedResult(packed, len(slots), block_size, needs=needs)

    def decode_masked(self, slots: Sequence[int], block_size: int) -> MaskedRound:
        size, needs = self._batch(len(slots)), self._all(slots)
        padded, key = self._slots(slots, size), _launch_key(size, block_size, needs=needs)
        self._admit_arrivals()
        start_s = time.perf_counter()
        ids = self.steps.propose(block_size, self.weights, self.state, padded, needs=needs)
        ids.copy_to_host_async()
        self.state, logits, taps = self.steps.verify_block(self.weights, self.state, padded, ids)
        self._note_time(("verify_block", *key), start_s)
        return MaskedRound(self, padded, Verified(ids, logits, taps), len(slots), needs)

    def accept(self, masked: MaskedRound, allowed: Any) -> PackedResult:
        """The rest of a round that `decode_masked` began; `allowed` uint32 [size, B, width]."""
        size, block = masked.verified.ids.shape
        key = _launch_key("accept_block", size, block, needs=masked.needs)
        after = masked.slots, masked.verified, allowed
        packed = self._launch(key, self.steps.accept_block, (self.weights,), *after, needs=masked.needs)
        return PackedResult(packed, masked.rows, block, needs=masked.needs)

    def decode_key(self, slots: Sequence[int], block_size: int, masked: bool = False) -> tuple[Any, ...]:
        """What a round of these slots is compiled for."""
        name = "accept_block" if masked else "decode_round"
        return _launch_key(name, self._batch(len(slots)), block_size, needs=self._all(slots))

    def is_compiled(self, key: Sequence[Any]) -> bool:
        """Whether there was a launch of that key, so that the next one compiles nothing."""
        return key in self._seen

    def finish(self, slots: Sequence[int]) -> None:
        self._admit_arrivals()
        self._update(("finish",), self.steps.finish, self._slots(slots, self.num_slots))

    def _update(self, key: tuple[Any, ...], step: Any, *what: Any) -> None:
        """`step(state, *what)`, a step without results."""
        start_s = time.perf_counter()
        self.state = step(self.state, *what)
        self._note_time(key, start_s)

    def _note_time(self, key: tuple[Any, ...], start_s: float) -> None:
        """Count the time since then, if a launch of this key is new: it has traced and compiled."""
        if key not in self._seen:
            self._seen.add(key)
            self.compile_s += time.perf_counter() - start_s

    def _all(self, slots: Iterable[int]) -> Needs:
        """What serves a round of all these slots, in which nothing of a prompt is reported."""
        if not self._needs:  # as for most
            return NOTHING
        return replace(combined(self._needs.get(slot, NOTHING) for slot in slots), prompt_logprobs=None)

    def _batch(self, rows: int) -> int:
        return bucket(rows, self.num_slots, self.sizes.min_batch)

    def _slots(self, slots: Sequence[int], size: int) -> jax.Array:
        """`slots` padded with the padding slot, on the device; the last few batches are kept there."""
        key = (*slots, *[self.num_slots] * (size - len(slots)))
        if key not in self._slot_arrays:
            if len(self._slot_arrays) >= 64:
                self._slot_arrays.clear()
            self._slot_arrays[key] = jax.device_put(np.array(key, np.int32), self.state.page_table.sharding)
        return self._slot_arrays[key]

    def _launch(self, key: tuple[Any, ...], step: Any, before: tuple[Any, ...], *after: Any, needs: Needs) -> jax.Array:
        """The packed result of `step(*before, state, *after, needs=needs)`."""
        self._admit_arrivals()
        start_s = time.perf_counter()
        self.state, packed = step(*before, self.state, *after, needs=needs)
        packed.copy_to_host_async()
        if key not in self._seen:  # the first call of a bucket traces and compiles before it returns
            self._seen.add(key)
            took_s = time.perf_counter() - start_s
            self._note_compiled(key, step.lower(*before, self.state, *after, needs=needs).compile(), took_s)
        return packed

    def _note_compiled(self, key: tuple[Any, ...], compiled: Any, took_s: float) -> None:
        """Count time and scratch of a new step; `lower` and `compile` have found what the call had made."""
        self.compile_s += took_s
        analysis = compiled.memory_analysis()
        scratch = analysis.temp_size_in_bytes if analysis else 0
        self.scratch_bytes = max(self.scratch_bytes or 0, scratch)
        log.info("%s: ready in %.1f s, scratch %s", " ".join(map(str, key)), took_s, _mb(scratch))

    # -- warm-up -------------------------------------------------------------------------------------------------

    def warmup_calls(
        self, block_sizes: Sequence[int], needs: Sequence[Needs] = (NOTHING,)
    ) -> Iterator[tuple[str, Callable[[], object]]]:
        """(label, call) for each bucket; a call runs the step on padding rows only, which changes nothing, and waits.

        Prefill rows times their width never exceed the chunk, which leaves some pairs of buckets unused.
        """
        yield "slots and tables", self.warm_updates
        for one in needs:
            for spare in self.spare_batches():
                for block in block_sizes:
                    on = spare, block, one
                    yield f"decode {len(spare)}×{block} {one}", lambda on=on: self._decode(*on).result()
            for size, width in prefill_buckets(self.max_prefill_rows, self.prefill_chunk):
                on = size, width, one
                yield f"prefill {size}×{width} {one}", lambda on=on: self._warm_prefill(*on)

    def spare_batches(self) -> list[list[int]]:
        """Padding slots for a round of each bucket."""
        return [[self.num_slots] * size for size in buckets(self.num_slots, self.sizes.min_batch)]

    def warm_updates(self) -> None:
        """Compile what tells the device of requests and pages."""
        for size in ADMISSION_BUCKETS:
            self._update(("admit", size), self.steps.admit, self._admission([], size))
        for size in UPDATE_BUCKETS:
            self._extend([], size)
        self.finish([])

    def _warm_prefill(self, size: int, width: int, needs: Needs) -> None:
        self._prefill(prefill_batch([], size, width, spare_slot=self.num_slots), 0, needs).result()


def _launch_key(*parts: Any, needs: Needs) -> tuple[Any, ...]:
    return parts if needs == NOTHING else (*parts, str(needs))
