"""What the compiler made of a step, beside the least it could have been."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from dflash_jax.aot.hlo import Program
from dflash_jax.aot.shapes import Pair, Work, batch, device_bytes, everywhere, state, weights
from dflash_jax.aot.topology import Tpu
from dflash_jax.cache import page_bytes, pool_shape
from dflash_jax.config import AttentionShape
from dflash_jax.drafters import Weights
from dflash_jax.errors import UserError
from dflash_jax.ops.dispatch import Kernels
from dflash_jax.state import DecodeState
from dflash_jax.steps import Steps

ATTENTION = "paged_attention"  # the kernel whose cost follows what is committed
LARGEST = 5  # instructions named in a report


@dataclass(frozen=True)
class Floor:
    """The least that a device can do: bytes of weights and of committed keys and values, operations of its products."""

    weights_bytes: int
    kv_bytes: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes

    def seconds(self, tpu: Tpu) -> float:
        return max(self.bytes / tpu.bandwidth_bytes_per_s, self.flops / tpu.flops_per_s)


@dataclass(frozen=True)
class Step:
    """A compiled step on one device.  Bytes and operations are of one run; `error`: why there is none.

    moved_bytes: to and from main memory, by the program's text, and what the kernels say of themselves; compiler_bytes,
    compiler_flops: the compiler's count, which has VMEM in it, too; compiler_cycles: its estimate for all but kernels.
    """

    name: str
    compile_s: float
    error: str | None = None
    fits: bool = False
    memory_bytes: int = 0
    weights_bytes: int = 0
    pools_bytes: int = 0
    scratch_bytes: int = 0
    program_bytes: int = 0
    kernels: dict[str, int] | None = None
    pool_copies: list[str] | None = None
    pools: int = 0
    pools_aliased: int = 0
    floor: Floor | None = None
    floor_s: float = 0.0
    moved_bytes: int = 0
    kernel_bytes: int = 0
    between_chips_bytes: int = 0
    compiler_bytes: float = 0.0
    compiler_flops: float = 0.0
    compiler_cycles: int = 0
    compiler_s: float | None = None
    largest: list[tuple[str, int]] | None = None

    @property
    def ratio(self) -> float:
        """Bytes moved over the floor's."""
        return self.moved_bytes / self.floor.bytes if self.floor else math.nan

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "moved_over_floor": self.ratio}


@dataclass(frozen=True)
class Bench:
    """A pair on a TPU: what each step is compiled from."""

    pair: Pair
    work: Work
    tpu: Tpu
    kernels: Kernels

    def run(self) -> list[Step]:
        steps = Steps(self.pair.steps(self.work, self.kernels))
        mesh, work = self.tpu.mesh, self.work
        params, held = weights(self.pair, mesh, work.dtype), state(self.pair, work, mesh)
        slots = everywhere(mesh, (work.requests,))
        decode = steps.decode_round, (work.block, params, held, slots), self.decode_floor(params)
        prefill = steps.prefill, (params, held, batch(work, mesh)), self.prefill_floor(params)
        return [
            self.compile(name, *step, params, held)
            for name, step in (("decode_round", decode), ("prefill", prefill))
        ]  # fmt: skip

    def compile(self, name: str, step: Any, args: Any, floor: Floor, params: Weights, held: DecodeState) -> Step:
        start_s = time.perf_counter()
        try:
            compiled = step.trace(*args).lower(lowering_platforms=("tpu",)).compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            took_s = time.perf_counter() - start_s
            return Step(name, took_s, error=_shortened(error), memory_bytes=self.tpu.memory_bytes,
                        weights_bytes=device_bytes(params), pools_bytes=device_bytes((held.kv, held.draft)),
                        floor=floor, floor_s=floor.seconds(self.tpu))  # fmt: skip
        return self.read(name, time.perf_counter() - start_s, compiled, floor, params, held)

    def read(
        self, name: str, took_s: float, compiled: Any, floor: Floor, params: Weights, held: DecodeState
    ) -> Step:
        program, memory, cost = Program.parse(compiled.as_text()), compiled.memory_analysis(), compiled.cost_analysis()
        if not program.main or memory is None:
            raise UserError(f"{name}: this libtpu tells nothing of what it has compiled")
        pools = (*held.kv, *held.draft)
        traffic, kernel_bytes = program.traffic(), self.kernel_bytes(program, name)
        used = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        used += memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
        counts: dict[str, int] = {}
        for kernel in program.kernels:
            counts[kernel.kernel_name] = counts.get(kernel.kernel_name, 0) + 1
        estimate_s = cost.get("optimal_seconds", -1.0) if cost else -1.0
        return Step(
            name, took_s, fits=used <= self.tpu.memory_bytes, memory_bytes=self.tpu.memory_bytes,
            weights_bytes=device_bytes(params), pools_bytes=device_bytes(pools), scratch_bytes=memory.temp_size_in_bytes,
            program_bytes=memory.generated_code_size_in_bytes, kernels=counts,
            pool_copies=program.copies_of({x.sharding.shard_shape(x.shape) for x in pools}), pools=len(pools),
            pools_aliased=self.aliased(program, (params, held), pools), floor=floor, floor_s=floor.seconds(self.tpu),
            moved_bytes=sum(traffic.values()) + kernel_bytes, kernel_bytes=kernel_bytes,
            between_chips_bytes=program.between_chips(), compiler_bytes=cost.get("bytes accessed", 0.0),
            compiler_flops=cost.get("flops", 0.0), compiler_cycles=program.cycles,
            compiler_s=estimate_s if estimate_s > 0 else None,  # it is negative where kernels confuse it
            largest=sorted(traffic.items(), key=lambda item: -item[1])[:LARGEST],
        )  # fmt: skip

    def kernel_bytes(self, program: Program, name: str) -> int:
        """What the kernels move by their own account, less the pages of full tables that hold nothing committed."""
        work, total = self.work, 0
        rows = work.requests if name == "decode_round" else work.chunk_rows
        spare = work.pages_per_slot - -(-self.committed(name) // work.page_size)
        for kernel in program.kernels:
            total += kernel.number("bytes_accessed")
            if kernel.kernel_name == ATTENTION:
                page = self.page_bytes(kernel, program)
                total -= rows * spare * page * self.row_tiles(kernel, program, rows, page)
        return total

    def committed(self, name: str) -> int:
        """Committed tokens that a step reads, of each request: a first chunk of a prompt reads none."""
        return self.work.committed if name == "decode_round" else max(0, self.work.committed - self.work.chunk)

    def page_bytes(self, kernel: Any, program: Program) -> int:
        pool = program.find(program.entry, kernel.operands[-1])
        assert pool is not None
        return pool.results[0].nbytes // pool.results[0].shape[0]

    def row_tiles(self, kernel: Any, program: Program, rows: int, page: int) -> int:
        """How often a kernel copies each page, by its own account."""
        others = [program.find(program.entry, name) for name in kernel.operands[2:4]]
        beside = kernel.results[0].nbytes + sum(x.results[0].nbytes for x in others if x)
        return round((kernel.number("bytes_accessed") - beside) / (rows * self.work.pages_per_slot * page))

    def aliased(self, program: Program, args: Any, pools: Sequence[Any]) -> int:
        """How many pools the results take over from the arguments."""
        leaves = jax.tree.leaves(args)
        numbers = [i for i, leaf in enumerate(leaves) if any(leaf is pool for pool in pools)]
        return len(program.aliased_parameters().intersection(numbers))

    # -- the floor -----------------------------------------------------------------------------------------------------

    def decode_floor(self, params: Weights) -> Floor:
        """All weights once, the head twice (draft and target), and the committed keys and values of both."""
        rows = self.work.requests * self.work.block
        head, read = self._read(params)
        products = 2 * rows * (read - head) + 2 * head * (2 * rows - self.work.requests)
        return self._floor(read + head, self._kv(self.committed("decode_round"), self.work.requests), products, rows)

    def prefill_floor(self, params: Weights) -> Floor:
        """All weights once; the head for one row of each prompt."""
        rows, draft = self.work.chunk_rows * self.work.chunk, self.pair.draft
        head, read = self._read(params)
        unused = device_bytes(params.draft["layers"]) // self.work.dtype.itemsize  # a prompt is only injected
        products = 2 * rows * (read - head - unused) + 2 * head * self.work.chunk_rows
        del draft
        return self._floor(read - unused, self._kv(self.committed("prefill"), self.work.chunk_rows), products, rows)

    def _read(self, params: Weights) -> tuple[int, int]:
        """Numbers on one device: of the head, and of all weights that a round reads (the embedding is looked up)."""
        size = self.work.dtype.itemsize
        head = device_bytes(params.target.get("head", params.target["embed"])) // size
        every = device_bytes(params) // size
        if "head" in params.target:
            every -= device_bytes(params.target["embed"]) // size
        return head, every

    def _kv(self, committed: int, requests: int) -> int:
        """Bytes of the committed keys and values on one device."""
        configs: tuple[AttentionShape, ...] = (self.pair.target, self.pair.draft)
        per_token = sum(page_bytes(config, 1, self.work.dtype) for config in configs) // self.tpu.devices
        return requests * committed * per_token

    def _floor(self, read: int, kv_bytes: int, products: int, rows: int) -> Floor:
        size = self.work.dtype.itemsize
        target = self.pair.target
        attention = 2 * rows * kv_bytes // size * target.group // max(1, self.work.requests)
        return Floor(read * size, kv_bytes, products + attention)


def _shortened(error: Exception) -> str:
    """The sentence that says how much memory is missing, of the compiler's pages about it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "Used" in line and "of" in line), lines[0])[:300]
