"""Triton's kernels as XLA is given them.  Needs triton, but no GPU and no jax_triton."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.benchmark.op_cases import op_cases
from dflash_jax.errors import UserError
from dflash_jax.ops import dispatch
from dflash_jax.ops.dispatch import Kernels
from dflash_jax.ops.kernel_packages import kernel_module, kernel_names
from dflash_jax.ops.shapes import find
from ops.test_triton import NAMES
from ops.triton_host import hosted, with_triton

pytestmark = [
    with_triton,
    pytest.mark.filterwarnings("ignore:.*Triton 3.10:UserWarning"),
]
CHOICE = "DFLASH_JAX_TRITON"
TARGET = "__gpu$xla.gpu.triton"
IN_PLACE = {"attend_projected": (6, 3), "norm_rope_write": (0, 2), "inject_write": (0, 0)}  # input, output: the pool


@contextmanager
def choosing(way: str) -> Iterator[None]:
    dispatch._kernel.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHOICE, way)
        yield
    dispatch._kernel.cache_clear()


def every_op() -> list[Any]:
    """What all ops with a kernel give at the named shapes; to be traced."""
    results = []
    for case in (case for name in NAMES for case in op_cases(find(name), jnp.bfloat16)):
        pools = () if case.pools is None else (case.pools,)
        results.append(getattr(Kernels("triton"), case.op)(*pools, *case.arguments, **case.options))
    return results


@pytest.fixture(scope="module")
def calls() -> list[Any]:
    """All custom calls of a program for CUDA with every op."""
    with choosing("xla"):
        return calls_of(every_op)


def calls_of(program: Callable[[], Any]) -> list[Any]:
    """As jaxlib's MLIR has them, compiled for CUDA."""
    found: list[Any] = []
    module: Any = jax.jit(program).trace().lower(lowering_platforms=("cuda",)).compiler_ir()
    for function in module.body.operations:
        for block in function.regions[0]:
            found += [op for op in block.operations if op.operation.name == "stablehlo.custom_call"]
    return found


def config(call: Any) -> Any:
    return call.attributes["mhlo.backend_config"]


def test_every_kernel_is_xlas_to_launch(calls: list[Any]):
    """Nothing else is called, and jax_triton was not even looked for."""
    assert {call.attributes["call_target_name"].value for call in calls} == {TARGET}
    package = kernel_module("triton", "by_xla").__name__.rpartition(".")[0]
    assert f"{package}.by_xla" in sys.modules
    names = {config(call)["name"].value for call in calls}
    assert len(names) >= len(kernel_names("triton")) and set(IN_PLACE) <= names


def test_a_launch_says_what_xla_asks_for(calls: list[Any]):
    for call in calls:
        told = config(call)
        numbers = [told[key].value for key in ("num_warps", "num_stages", "grid_x", "grid_y", "grid_z")]
        assert all(number >= 1 for number in numbers)
        assert {str(told[key].type) for key in ("num_warps", "num_stages", "grid_x", "grid_y", "grid_z")} == {"i32"}
        assert told["debug"].value is False


def test_pools_are_written_in_place(calls: list[Any]):
    seen: set[str] = set()
    for call in calls:
        name, aliases = config(call)["name"].value, [str(x) for x in call.attributes["output_operand_aliases"]]
        made = None if name not in IN_PLACE else call.results[IN_PLACE[name][1]]
        if made is None or made.type.shape == [1]:  # a draft's attention only reads the pool
            assert not aliases
            continue
        (alias,), (given, index) = aliases, IN_PLACE[name]
        assert f"operand_index = {given}," in alias
        assert f"output_tuple_indices = [{index if len(call.results) > 1 else ''}]" in alias
        seen.add(name)
    assert seen == set(IN_PLACE)


def test_jaxlibs_triton_reads_what_asks_for_pages_ahead():
    dialect, mlir = pytest.importorskip("jaxlib.triton.dialect"), pytest.importorskip("jaxlib.mlir.ir")
    [case] = [one for one in op_cases(find(NAMES[0]), jnp.bfloat16) if one.op == "block_attention"]
    tiles = kernel_module("triton", "tiles")
    with choosing("xla"), tiles.forced(tiles.Cut(64, 64, 4, 3, 264, ahead=64)):
        first, _ = calls_of(lambda: Kernels("triton").block_attention(*case.arguments, **case.options))
    text = config(first)["ir"].value
    assert "prefetch.global.L2" in text
    with mlir.Context() as context:
        dialect.register_dialect(context)
        assert mlir.Module.parse(text).operation.verify()


def test_jaxlibs_triton_reads_every_kernel(calls: list[Any]):
    """jaxlib has the dialect of XLA's Triton, another version than the package's.  Arguments: inputs, then outputs."""
    dialect = pytest.importorskip("jaxlib.triton.dialect")
    mlir: Any = pytest.importorskip("jaxlib.mlir.ir")
    for call in calls:
        name, text = config(call)["name"].value, config(call)["ir"].value
        with mlir.Context() as context:
            dialect.register_dialect(context)
            module = mlir.Module.parse(text)
            assert module.operation.verify()
            (function,) = module.body.operations
            assert function.attributes["sym_name"].value == name
        header = next(line for line in text.splitlines() if f"@{name}(" in line)
        pointers = re.findall(r"!tt.ptr<(\w+)> \{tt.divisibility = 16 : i32\}", header)
        types = [str(x.type.element_type) for x in (*call.operands, *call.results)]
        assert pointers == types
        assert "loc(" not in text  # where the source lies is no part of a program


def test_what_is_no_way_is_refused():
    with choosing("pigeon"), pytest.raises(UserError, match=f"{CHOICE}='pigeon' is no way .* jax_triton, xla"):
        jax.eval_shape(lambda: every_op())  # traced anew


def test_it_is_xla_unless_asked(monkeypatch: pytest.MonkeyPatch):
    """Where there is no GPU to ask, too: what is lowered runs elsewhere."""
    launch = kernel_module("triton", "launch")
    for value in ("", None):
        monkeypatch.delenv(CHOICE, raising=False) if value is None else monkeypatch.setenv(CHOICE, value)
        assert launch.way() == "xla" and launch.described() == "launched by XLA"


@hosted
def test_an_xla_that_takes_no_kernels_says_why(monkeypatch: pytest.MonkeyPatch):
    """This machine's compiler, for CPU, knows no such call, as a version without it."""
    by_xla = kernel_module("triton", "by_xla")
    monkeypatch.setattr(by_xla.jax, "default_backend", lambda: "gpu")
    assert "__gpu$xla.gpu.triton" in by_xla.refusal()
