"""Triton's kernels for every chip that CUDA serves here: what each op launches at its named shapes is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.benchmark.op_cases import OpCase, op_cases
from dflash_jax.ops.dispatch import Kernels
from dflash_jax.ops.kernel_packages import kernel_module, kernel_names
from dflash_jax.ops.shapes import PREFILL, VERIFY, ModelShape, Shape, find
from ops.triton_host import SHARED_BYTES, Launch, recording, with_triton

pytestmark = [
    with_triton,
    pytest.mark.filterwarnings("ignore:.*Triton 3.10:UserWarning"),  # what 3.9 says of its successor
]
CHIPS = {80: "A100", 90: "H100, H200", 100: "B200"}
NAMES = (
    "smollm2-135m verify 1x8 over 512", "smollm2-135m draft 8x8 over 512", "qwen3-8b draft 1x16 over 2048",
    "qwen3-8b verify 32x16 over 2048", "qwen3-8b draft 8x16 over 2048 window 512", "qwen3-8b prefill 1x512 over 2048",
)  # fmt: skip


def launches(dtype: type) -> list[Launch]:
    """What the ops launch at the named shapes, without what compiles alike.  Nothing is computed."""

    def trace() -> None:
        for case in (case for name in NAMES for case in op_cases(find(name), dtype)):
            call(case)
            used.add(case.op)

    def key(one: Launch) -> str:
        constants = {name: value for name, value in one.constants.items() if name != "layer"}
        return repr((one.kernel, one.settings, constants, [x.dtype for x in (*one.arrays, *one.out)]))

    used: set[str] = set()
    with recording() as found:
        jax.eval_shape(trace)
    assert used >= set(kernel_names("triton"))
    return list({key(one): one for one in found}.values())


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS, ids=CHIPS.values())
def test_every_kernel_compiles(chip: int):
    """Its code is for the chip, and a program's shared memory fits there."""
    for one in launches(jnp.bfloat16):
        made = one.compile(chip)
        assert f".target sm_{chip}" in made.asm["ptx"] and made.asm["cubin"]
        assert made.metadata.shared <= SHARED_BYTES[chip], (one.kernel, one.constants)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_wide_heads_fit_the_least_memory(head_dim: int, dtype: type):
    """Of an A100's multiprocessor: blocks and prefill chunks."""
    model = ModelShape("wide", 512, 1024, 8, 2, head_dim, 256, 16, 2, 2)
    shapes = Shape(model, VERIFY, 4, 16, 2048), Shape(model, PREFILL, 4, 512, 2048)
    cases = [case for shape in shapes for case in op_cases(shape, dtype) if "attention" in case.op]
    with recording() as found:
        jax.eval_shape(lambda: [call(case) for case in cases])
    assert any(one.kernel.fn.__name__ == "attend" for one in found)
    for one in found:
        assert one.compile(80).metadata.shared <= SHARED_BYTES[80], (one.kernel, one.constants)


def test_the_head_in_float32_compiles():
    for one in launches(jnp.float32):
        if one.kernel.fn.__name__ == "best_of_tiles":
            assert one.compile(90).metadata.shared <= SHARED_BYTES[90]


def test_pages_that_are_asked_for_ahead():
    """Of both kernels of attention, keys and values alike; no program asks unless its cut says so."""
    case = find("smollm2-135m verify 1x8 over 512")
    model = case.model
    for ahead in (0, 64):
        with recording() as found:
            tiles = kernel_module("triton", "tiles")  # the package is loaded anew for the recording
            load = tiles.Load.of(1, case.rows, model.kv_heads, model.group, model.head_dim, 528, False)
            rule = tiles.rule_of_thumb(load)
            with tiles.forced(rule._replace(ahead=ahead)):
                jax.eval_shape(lambda: [call(one) for one in op_cases(case, jnp.bfloat16) if "attention" in one.op])
        asked = [one.compile(90).asm["ptx"].count("prefetch.global.L2") for one in found if one.grid[2:]]
        assert len(asked) == 2 and all(n == (2 if ahead else 0) for n in asked)


def call(case: OpCase) -> Any:
    pools = () if case.pools is None else (case.pools,)
    return getattr(Kernels("triton"), case.op)(*pools, *case.arguments, **case.options)
