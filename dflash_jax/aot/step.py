"""What the compiler made of one step, and how it is told."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from dflash_jax.aot.floors import Floor


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: what it has, and what a step holds in it.  scratch and program are unknown (None) where the
    compiler found that it does not fit."""

    device: int
    weights: int
    pools: int
    scratch: int | None
    program: int | None

    @property
    def used(self) -> int:
        return self.weights + self.pools + (self.scratch or 0) + (self.program or 0)


@dataclass(frozen=True)
class Pools:
    """Arrays of keys and values: how many there are, of how many the results take over the memory, and the names of
    instructions that copy one."""

    count: int
    aliased: int
    copies: list[str]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one run on one device, to and from main memory.

    moved: of all, as the program's text and the kernels' own estimates add up, `kernels` of it by these;
    between_chips: what collectives take in; largest: the instructions that move most.
    """

    moved: int
    kernels: int
    between_chips: int
    largest: list[tuple[str, int]]


@dataclass(frozen=True)
class Compiler:
    """The compiler's own figures: bytes count what lies in VMEM as well; cycles are of all but kernels and waiting for
    copies; seconds are None where it has no sensible answer."""

    bytes: float
    flops: float
    cycles: int
    seconds: float | None


@dataclass(frozen=True)
class Step:
    """A step as compiled; `error` says why there is nothing to tell of its program."""

    name: str
    compile_s: float
    memory: Memory
    floor: Floor
    floor_s: float
    error: str | None = None
    kernels: dict[str, int] | None = None
    pools: Pools | None = None
    traffic: Traffic | None = None
    compiler: Compiler | None = None

    @property
    def fits(self) -> bool:
        return self.error is None and self.memory.used <= self.memory.device

    @property
    def moved_over_floor(self) -> float:
        return self.traffic.moved / self.floor.bytes if self.traffic else math.nan

    def as_json(self) -> dict[str, Any]:
        found = {**asdict(self), "fits": self.fits}
        if self.traffic:
            found["moved_over_floor"] = round(self.moved_over_floor, 4)
        return found

    def text(self) -> str:
        """Lines for people."""
        return "\n  ".join([f"{self.name} (compiled in {self.compile_s:.0f} s)", *self._lines()])

    def _lines(self) -> list[str]:
        memory, floor = self.memory, self.floor
        parts = [f"weights {gb(memory.weights)}", f"pools {gb(memory.pools)}"]
        if memory.scratch is not None and memory.program is not None:
            parts += [f"scratch {gb(memory.scratch)}", f"program {gb(memory.program)}"]
        lines = [
            f"{'fits' if self.fits else 'does not fit'}: {', '.join(parts)} of {gb(memory.device)} a device",
            f"floor: {gb(floor.bytes)} to read (weights {gb(floor.weights_bytes)}, KV {gb(floor.kv_bytes)}),"
            f" {floor.flops / 1e12:.2f} Tflop: {self.floor_s * 1e3:.2f} ms",
        ]
        return [*lines, f"the compiler: {self.error}"] if self.error else [*lines, *self._program_lines()]

    def _program_lines(self) -> list[str]:
        assert self.traffic and self.compiler and self.pools and self.kernels is not None
        kernels = ", ".join(f"{count} {name}" for name, count in sorted(self.kernels.items())) or "none"
        largest = ", ".join(f"{name} {gb(size)}" for name, size in self.traffic.largest)
        seconds = "no time" if self.compiler.seconds is None else f"{self.compiler.seconds * 1e3:.2f} ms"
        copies = ", ".join(self.pools.copies) or "none"
        between = self.traffic.between_chips
        return [
            f"moved: {gb(self.traffic.moved)}, {self.moved_over_floor:.3f} of the floor; kernels"
            f" {gb(self.traffic.kernels)} of it{f'; between devices {gb(between)}' if between else ''}",
            f"most of it: {largest}",
            f"pools: {self.pools.aliased} of {self.pools.count} aliased; copies of a pool: {copies}",
            f"kernels: {kernels}",
            f"the compiler's estimate: {seconds}, {self.compiler.cycles / 1e6:.1f} M cycles outside kernels,"
            f" {self.compiler.flops / 1e12:.2f} Tflop, {gb(self.compiler.bytes)} accessed (VMEM included)",
        ]


def gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.3f} GB" if size_bytes < 1e9 else f"{size_bytes / 1e9:.2f} GB"
