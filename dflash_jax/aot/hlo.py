"""Reading a compiled program's text: what its instructions move to and from main memory.

The compiler's own `bytes accessed` counts what lies in VMEM too, and whole arrays where a copy takes a slice.  Here an
instruction's operands and results count where they lie in main memory, and as much of them as it touches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

SIZES = {
    "pred": 1, "s4": 1, "u4": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4,
    "f32": 4, "s64": 8, "u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip
# These move nothing: they name what is there already, or wait for what was counted at its start.
STILL = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "async-update", "opt-barrier", "add-dependency",
}  # fmt: skip
STILL_CALLS = {"ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound"}
SLICING = {"dynamic-slice", "slice", "gather"}
REARRANGING = {"bitcast", "copy", "transpose"}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Buffer:
    """An array of the program; space 0 is main memory."""

    dtype: str
    shape: tuple[int, ...]
    space: int

    @property
    def nbytes(self) -> int:
        return SIZES.get(self.dtype, 0) * math.prod(self.shape)

    @property
    def main_bytes(self) -> int:
        return 0 if self.space else self.nbytes


@dataclass(frozen=True)
class Instruction:
    """`name` = `kind`(`operands`), `attributes`; results is its type, flattened."""

    name: str
    kind: str
    results: tuple[Buffer, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    def attribute(self, key: str) -> str | None:
        found = re.search(rf"\b{key}=%?([\w\.\-]+)", self.attributes)
        return found and found.group(1)

    def number(self, key: str) -> int:
        """A number in the backend's settings; 0 where there is none."""
        found = re.search(rf'"{key}":"(-?\d+)"', self.attributes)
        return int(found.group(1)) if found else 0

    @property
    def target(self) -> str:
        """Of a custom call."""
        found = re.search(r'custom_call_target="([^"]+)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def is_kernel(self) -> bool:
        return self.kind == "custom-call" and self.target == "tpu_custom_call"

    @property
    def kernel_name(self) -> str:
        """The name that a kernel was given, by the name of its instruction."""
        return re.sub(r"[\.\d]+$", "", self.name)


@dataclass
class Program:
    """The computations of a module by name, each a list of instructions in order."""

    computations: dict[str, list[Instruction]]
    entry: str
    header: str
    _by_name: dict[str, dict[str, Instruction]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Program:
        computations: dict[str, list[Instruction]] = {}
        entry, current = "", None
        for line in text.splitlines():
            opened = re.match(r"(ENTRY )?%?([\w\.\-]+) \(.*\{$", line)
            if opened:
                current = computations.setdefault(opened.group(2), [])
                entry = opened.group(2) if opened.group(1) else entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (found := parse_instruction(line)):
                current.append(found)
        return cls(computations, entry, text.partition("\n")[0])

    @cached_property
    def main(self) -> list[Instruction]:
        return self.computations[self.entry]

    def find(self, computation: str, name: str) -> Instruction | None:
        names = self._by_name.setdefault(computation, {x.name: x for x in self.computations.get(computation, ())})
        return names.get(name)

    def buffer(self, name: str) -> Buffer:
        """The one result of an instruction of the main computation."""
        found = self.find(self.entry, name)
        if found is None:
            raise KeyError(f"the program has no instruction {name}")
        return found.results[0]

    @cached_property
    def kernels(self) -> list[Instruction]:
        return [x for x in self.main if x.is_kernel]

    @cached_property
    def cycles(self) -> int:
        """The compiler's estimate for all instructions but kernels, which it cannot look into."""
        return sum(x.number("estimated_cycles") for x in self.main)

    def parameters(self) -> list[tuple[int, Buffer]]:
        """Number and array of each argument."""
        return [(int(x.attributes[1 : x.attributes.index(")")]), x.results[0]) for x in self.main
                if x.kind == "parameter"]  # fmt: skip

    def aliased_parameters(self) -> set[int]:
        """Numbers of the arguments whose memory the results take over."""
        found = re.search(r"input_output_alias=\{(.*?) \}", self.header)
        return {int(n) for n in re.findall(r"\((\d+), \{", found.group(1))} if found else set()

    def copies_of(self, shapes: Iterable[tuple[int, ...]]) -> list[str]:
        """Names of instructions that copy an array of one of these shapes, wherever to."""
        wanted = set(shapes)
        return [
            x.name for x in self.everything()
            if x.kind in ("copy", "copy-start") and any(b.shape in wanted for b in x.results)
        ]  # fmt: skip

    def everything(self) -> Iterator[Instruction]:
        for computation in self.computations.values():
            yield from computation

    def traffic(self) -> dict[str, int]:
        """Bytes to and from main memory by instruction, kernels not counted."""
        found = {x.name: self._moved(x) for x in self.main if not x.is_kernel}
        return {name: size for name, size in found.items() if size}

    def between_chips(self) -> int:
        """Bytes that collectives take in."""
        kinds = {*COLLECTIVES, *(f"{kind}-start" for kind in COLLECTIVES)}
        found = ((name, x) for name, body in self.computations.items() for x in body if x.kind in kinds)
        return sum(b.nbytes for name, x in found for b in self._operands(name, x))

    def _operands(self, computation: str, x: Instruction) -> list[Buffer]:
        found = (self.find(computation, name) for name in x.operands)
        return [buffer for operand in found if operand for buffer in operand.results]

    def _moved(self, x: Instruction) -> int:
        if x.kind in STILL or x.kind.endswith("-done") or x.target in STILL_CALLS:
            return 0
        if x.kind == "slice-start":  # (from whole, …), to, a flag
            to = x.results[-2]
            return to.main_bytes + (to.nbytes if self._from_main(x) else 0)
        if x.kind.endswith("-start"):  # its results are both ends: what is taken from and what is written
            return sum(b.main_bytes for b in x.results)
        written = self._written(x)
        if x.kind in SLICING:
            return written + (sum(b.nbytes for b in x.results) if self._from_main(x) else 0)
        return written + sum(self._read(x, i) for i in range(len(x.operands)))

    def _from_main(self, x: Instruction) -> bool:
        first = self.find(self.entry, x.operands[0])
        return first is not None and any(b.main_bytes for b in first.results)

    def _written(self, x: Instruction) -> int:
        """Bytes of results in main memory; of an update in place, the update."""
        body = self._body(x)
        last = next((y for y in body if y.root), None)
        if last and last.kind == "dynamic-update-slice" and x.results[0].main_bytes:
            update = self.find(x.attribute("calls") or "", last.operands[1])
            return sum(b.nbytes for b in update.results) if update else 0
        return sum(b.main_bytes for b in x.results)

    def _body(self, x: Instruction) -> list[Instruction]:
        return self.computations.get(x.attribute("calls") or "", []) if x.kind == "fusion" else []

    def _read(self, x: Instruction, i: int) -> int:
        operand = self.find(self.entry, x.operands[i])
        if operand is None or not any(b.main_bytes for b in operand.results):
            return 0
        whole = sum(b.main_bytes for b in operand.results)
        return min(whole, self._touched(x, i, whole)) if x.kind == "fusion" else whole

    def _touched(self, x: Instruction, i: int, whole: int) -> int:
        """Bytes of a fusion's operand i that its body reads, of `whole`: where only slices are taken, the slices."""
        name = x.attribute("calls") or ""
        body = self.computations.get(name, [])
        parameter = next((y for y in body if y.kind == "parameter" and y.attributes.startswith(f"({i})")), None)
        if parameter is None:
            return whole
        names, total = {parameter.name}, 0
        for y in body:
            used = [k for k, operand in enumerate(y.operands) if operand in names]
            if not used:
                continue
            if self._rearranges(y):
                names.add(y.name)
            elif y.kind in SLICING and used == [0]:
                total += sum(b.nbytes for b in y.results)
            elif y.kind == "fusion":
                total += sum(self._touched(y, k, whole) for k in used)
            elif not (y.kind == "dynamic-update-slice" and used == [0]):
                return whole
        return whole if any(y.root and y.name in names for y in body) else total

    def _rearranges(self, x: Instruction) -> bool:
        """Whether an instruction within a fusion only names or orders its operand anew: it is made where it is used."""
        if x.kind in REARRANGING:
            return True
        body = self._body(x)
        return bool(body) and all(y.kind in ("parameter", *REARRANGING) for y in body)


def parse_instruction(line: str) -> Instruction | None:
    """One line of a computation; None for what is no instruction."""
    found = re.match(r"\s+(ROOT )?%?([\w\.\-]+) = ", line)
    if not found:
        return None
    type_end = _after_type(line, found.end())
    opened = line.find("(", type_end)
    closed = _matching(line, opened)
    kind = line[type_end:opened].strip()
    inside, rest = line[opened + 1 : closed], line[closed + 1 :]
    if kind in ("parameter", "constant"):
        operands, rest = (), f"({inside})" + rest
    else:
        operands = tuple(re.findall(r"%([\w\.\-]+)", inside))
    buffers = tuple(_buffers(line[found.end() : type_end]))
    return Instruction(found.group(2), kind, buffers, operands, rest, bool(found.group(1)))


def _after_type(line: str, start: int) -> int:
    """Where the type that begins at `start` ends."""
    if line[start] == "(":
        return _matching(line, start) + 1
    return line.index(" ", start)


def _matching(line: str, opened: int) -> int:
    """Position of the parenthesis that closes the one at `opened`."""
    depth = 0
    for i in range(opened, len(line)):
        depth += {"(": 1, ")": -1}.get(line[i], 0)
        if depth == 0:
            return i
    return len(line)


def _buffers(text: str) -> Iterator[Buffer]:
    for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", text):
        space = re.search(r"S\((\d+)\)", layout)
        shape = tuple(int(n) for n in dims.split(",") if n)
        yield Buffer(dtype, shape, int(space.group(1)) if space else 0)
