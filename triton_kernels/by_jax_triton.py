"""Kernels launched by jax_triton: the one place that calls it, and makes its calls ones that a CUDA graph can hold.

jax-triton 0.3 lowers a kernel to a custom call of the old interface.  XLA leaves those out of its command buffers (CUDA
graphs), so that each cuts the graph in two and is launched from the host.  jaxlib has the same launcher under its new
interface, which may be captured; jax-triton 0.4 uses it, and here 0.3 is made to.
"""

from __future__ import annotations

import inspect
import zlib
from typing import Any

import jax
import jax.core
import jax_triton as jt
from jax_triton import triton_lib
from jaxlib import gpu_triton

CAPTURABLE = "triton_kernel_call_ffi"
ALIGNMENT_BYTES = 16  # of XLA's buffers, which triton's code relies on

_OLD = "out_type" not in inspect.signature(jt.triton_call).parameters


def launch(
    kernel: Any, *arrays: Any, out: Any, grid: tuple[int, ...], input_output_aliases: dict[int, int] | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """`kernel` over `grid` on arrays and then outputs shaped as `out`; options are constants and launch settings."""
    aliases = input_output_aliases or {}
    if not _OLD:
        return jt.triton_call(*arrays, kernel=kernel, grid=grid, out_type=out, input_output_aliases=aliases, **options)
    name = kernel.fn.__name__
    call = jax.ffi.ffi_call(CAPTURABLE, out, input_output_aliases=aliases)
    return call(*arrays, name=name, opaque=_opaque(kernel, name, (*arrays, *jax.tree.leaves(out)), grid, **options))


def _opaque(
    kernel: Any, name: str, arrays: tuple[Any, ...], grid: tuple[int, ...], num_warps: int = 4, num_stages: int = 3,
    **constants: Any,
) -> bytes:  # fmt: skip
    """What the launcher is told: the kernel compiled for the first GPU, its grid and its parameters."""
    compiled, _ = triton_lib.get_or_create_triton_kernel(
        triton_lib.get_cuda_backend, "cuda", kernel, [_pointer(x) for x in arrays], [],
        num_warps=num_warps, num_stages=num_stages, num_ctas=1, compute_capability=None, enable_fp_fusion=True,
        metaparams=constants, dump=False,
    )  # fmt: skip
    parameters = [gpu_triton.create_array_parameter(0, ALIGNMENT_BYTES) for _ in arrays]
    call = gpu_triton.TritonKernelCall(compiled, *(*grid, 1, 1)[:3], parameters)
    return zlib.compress(call.to_proto(name, b""))


def _pointer(x: Any) -> str:
    """Triton's name of a pointer to the elements of x."""
    return triton_lib.get_triton_type(jax.core.ShapedArray(x.shape, x.dtype))
