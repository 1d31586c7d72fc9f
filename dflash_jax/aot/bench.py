"""Compiling the steps of a pair for a TPU, and reading what came of it."""

from __future__ import annotations

import collections
import importlib.metadata
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dflash_jax.aot.floors import Floor, Floors
from dflash_jax.aot.hlo import Instruction, Program
from dflash_jax.aot.shapes import Pair, Work, batch, device_bytes, everywhere, state, weights
from dflash_jax.aot.step import Compiler, Memory, Pools, Step, Traffic
from dflash_jax.aot.topology import Tpu
from dflash_jax.errors import UserError
from dflash_jax.ops.dispatch import Kernels
from dflash_jax.steps import Steps

ATTENTION = "paged_attention"  # the kernel whose cost follows what is committed
LARGEST = 4  # instructions named in a report
NO_MEMORY = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True)
class Bench:
    """A pair on a TPU: what its steps are compiled from."""

    preset: str
    pair: Pair
    work: Work
    tpu: Tpu
    kernels: Kernels

    def heading(self) -> str:
        work, tpu = self.work, self.tpu
        return (
            f"{self.preset} on {tpu.devices} of {tpu.name}, {work.dtype.name}; {self.kernels.reason}\n"
            f"{work.requests} requests of {work.committed} tokens in pages of {work.page_size}, blocks of {work.block};"
            f" {work.chunk_rows} chunk(s) of {work.chunk} tokens after {work.before_chunk}"
        )

    def facts(self) -> dict[str, Any]:
        work, tpu = self.work, self.tpu
        versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
        return {
            "preset": self.preset, "tpu": tpu.name, "devices": tpu.devices, "dtype": work.dtype.name,
            "kernels": self.kernels.backend, "requests": work.requests, "committed": work.committed,
            "block": work.block, "page_size": work.page_size, "chunk": work.chunk, "chunk_rows": work.chunk_rows,
            "before_chunk": work.before_chunk, "packages": versions,
        }  # fmt: skip

    def run(self) -> list[Step]:
        """The decode round and prefill."""
        steps, mesh, work = Steps(self.pair.steps(self.work, self.kernels)), self.tpu.mesh, self.work
        params, held = weights(self.pair, mesh, work.dtype), state(self.pair, work, mesh)
        floors = Floors(self.pair, work, self.tpu.devices, params)
        slots, pools = everywhere(mesh, (work.requests,)), (*held.kv, *held.draft)
        memory = Memory(self.tpu.memory_bytes, device_bytes(params), device_bytes(pools), None, None)
        decode = Job("decode_round", (work.block, params, held, slots), floors.decode(), work.committed, work.requests)
        chunk = Job("prefill", (params, held, batch(work, mesh)), floors.prefill(), work.before_chunk, work.chunk_rows)
        jobs = (decode, steps.decode_round), (chunk, steps.prefill)
        return [self.compile(job, step, memory, pools) for job, step in jobs]

    def compile(self, job: Job, step: Any, memory: Memory, pools: Sequence[Any]) -> Step:
        start_s = time.perf_counter()
        floor_s = max(job.floor.bytes / self.tpu.bandwidth_bytes_per_s, job.floor.flops / self.tpu.flops_per_s)
        try:
            compiled = step.trace(*job.arguments).lower(lowering_platforms=("tpu",)).compile()
        except jax.errors.JaxRuntimeError as error:
            if NO_MEMORY not in str(error):
                raise
            took_s = time.perf_counter() - start_s
            return Step(job.name, took_s, memory, job.floor, floor_s, error=_shortened(error))
        took_s = time.perf_counter() - start_s
        program, found = Program.parse(compiled.as_text()), compiled.memory_analysis()
        if not program.main or found is None:
            raise UserError(f"{job.name}: this libtpu tells nothing of what it has compiled")
        full = Memory(
            memory.device, memory.weights, memory.pools, found.temp_size_in_bytes, found.generated_code_size_in_bytes
        )
        return Step(
            job.name, took_s, full, job.floor, floor_s,
            kernels=dict(collections.Counter(kernel.kernel_name for kernel in program.kernels)),
            pools=pools_of(program, pools), traffic=self.traffic(program, job),
            compiler=compiler_of(program, compiled.cost_analysis() or {}),
        )  # fmt: skip

    def traffic(self, program: Program, job: Job) -> Traffic:
        by_name = program.traffic()
        own = sum(self.kernel_bytes(kernel, program, job) for kernel in program.kernels)
        largest = sorted(by_name.items(), key=lambda item: -item[1])[:LARGEST]
        return Traffic(sum(by_name.values()) + own, own, program.between_chips(), largest)

    def kernel_bytes(self, kernel: Instruction, program: Program, job: Job) -> int:
        """What a kernel says it moves.  Attention speaks of full tables and copies what is committed, once for each
        tile of rows: the pages beyond are taken off."""
        said = kernel.number("bytes_accessed")
        if kernel.kernel_name != ATTENTION:
            return said
        q, own, pool = (program.buffer(name) for name in kernel.operands[2:])
        page_bytes = pool.nbytes // pool.shape[0]
        pages = said - kernel.results[0].nbytes - q.nbytes - own.nbytes
        times = round(pages / (job.requests * self.work.pages_per_slot * page_bytes))
        spare = self.work.pages_per_slot - -(-job.committed // self.work.page_size)
        return said - times * job.requests * spare * page_bytes


@dataclass(frozen=True)
class Job:
    """A step to compile, for `requests` rows that have `committed` tokens each."""

    name: str
    arguments: tuple[Any, ...]
    floor: Floor
    committed: int
    requests: int


def pools_of(program: Program, pools: Sequence[Any]) -> Pools:
    """Pools are known by their shape on a device: arguments that a step does not use have no number in the program."""
    shapes = {x.sharding.shard_shape(x.shape) for x in pools}
    aliased = program.aliased_parameters()
    kept = [number for number, buffer in program.parameters() if buffer.shape in shapes and number in aliased]
    return Pools(len(pools), len(kept), program.copies_of(shapes))


def compiler_of(program: Program, cost: dict[str, float]) -> Compiler:
    seconds = cost.get("optimal_seconds", -1.0)  # negative where kernels confuse it
    return Compiler(cost.get("bytes accessed", 0.0), cost.get("flops", 0.0), program.cycles,
                    seconds if seconds > 0 else None)  # fmt: skip


def _shortened(error: Exception) -> str:
    """The sentence that says how much memory is missing, of the compiler's pages about it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "Used" in line and " of " in line), lines[0])[:300]
