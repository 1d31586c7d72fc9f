"""Kernels launched by XLA itself: it is given their Triton IR, and compiles and launches them as it does its own.

In a CUDA graph such a kernel is a node whose addresses XLA sets anew for little; a call by jax_triton is a graph within
the graph, which is captured again whenever one of its buffers has moved.  XLA brings a Triton of its own, so that the
code may differ from what the triton package makes of the same kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

TARGET = "__gpu$xla.gpu.triton"  # the custom call that XLA's GPU compiler knows
ALIGNMENT_BYTES = 16  # of XLA's buffers, at least
PROBED = 64  # numbers in the row of the kernel that is tried
FRONTEND_CAPABILITY = 90  # XLA compiles for the chip at hand; what the kernels use is one IR for all chips from 8.0 on
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int32": "i32", "uint32": "u32", "bool": "i1"}


def launch(
    kernel: Any, *arrays: Any, out: Any, grid: tuple[int, ...], input_output_aliases: dict[int, int] | None = None,
    num_warps: int = 4, num_stages: int = 3, **constants: Any,
) -> Any:  # fmt: skip
    """`kernel` over `grid` on arrays and then outputs shaped as `out`; constants are its own, by name."""
    types = tuple(TYPES[str(x.dtype)] for x in (*arrays, *jax.tree.leaves(out)))
    text = triton_ir(kernel, types, tuple(sorted(constants.items())), num_warps, num_stages)
    x, y, z = (*grid, 1, 1)[:3]
    sizes = {"num_warps": num_warps, "num_stages": num_stages, "grid_x": x, "grid_y": y, "grid_z": z}
    call = jax.ffi.ffi_call(TARGET, out, input_output_aliases=input_output_aliases)
    attributes = {name: np.int32(size) for name, size in sizes.items()}
    return call(*arrays, name=kernel.fn.__name__, ir=text, debug=False, **attributes)


def refusal() -> str | None:
    """Why XLA does not compile a kernel for the GPU at hand; None: it does, or there is no GPU (what is lowered runs
    elsewhere).

    The custom call is XLA's own affair: a version may lack it, or a Triton that reads the IR of the package's.
    """
    if jax.default_backend() != "gpu":
        return None
    from .norms import add_norm_row

    row = jax.ShapeDtypeStruct((1, PROBED), np.float32)
    weight = jax.ShapeDtypeStruct((PROBED,), np.float32)

    def probe(x: Any, w: Any) -> Any:
        return launch(add_norm_row, x, x, w, out=(row, row), grid=(1,), num_warps=1, eps=1e-6, H=PROBED, BH=PROBED)

    try:
        jax.jit(probe).lower(row, weight).compile()
    except Exception as error:  # whatever that version's compiler says
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}" if str(error) else type(error).__name__
    return None


@functools.lru_cache(maxsize=1024)
def triton_ir(
    kernel: Any, types: tuple[str, ...], constants: tuple[tuple[str, Any], ...], num_warps: int, num_stages: int
) -> str:
    """The kernel on pointers to such elements, as text: simplified, for no chip yet, without places in the source."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", FRONTEND_CAPABILITY, 32)
    backend: Any = make_backend(target)
    options = backend.parse_options({"num_warps": num_warps, "num_stages": num_stages})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    made = _source(kernel, types, dict(constants)).make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    return backend.make_ttir(made, {}, options, FRONTEND_CAPABILITY).str_nodebug()


def _source(kernel: Any, types: tuple[str, ...], constants: dict[str, Any]) -> Any:
    from triton.compiler import ASTSource

    pointers = dict(zip(kernel.arg_names, (f"*{name}" for name in types), strict=False))
    aligned: Any = {(i,): [["tt.divisibility", ALIGNMENT_BYTES]] for i in range(len(types))}
    return ASTSource(kernel, pointers | dict.fromkeys(constants, "constexpr"), constants, aligned)
