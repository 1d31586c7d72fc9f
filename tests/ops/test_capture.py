"""CUDA graphs: how Triton kernels are called.  Needs the packages for CUDA, but no GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.ops.kernel_packages import load_kernel
from dflash_jax.ops.shapes import TINY

pytest.importorskip("jax_triton")
gpu_triton: Any = pytest.importorskip("jaxlib.gpu_triton")
if not hasattr(gpu_triton, "TritonKernelCall"):
    pytest.skip("no CUDA plugin is installed", allow_module_level=True)


def test_kernels_are_called_in_the_way_that_may_be_captured(monkeypatch: pytest.MonkeyPatch):
    """A custom call of the old interface cuts XLA's command buffer in two and is launched from the host."""
    monkeypatch.setenv("DFLASH_JAX_TRITON", "jax_triton")
    monkeypatch.setattr(gpu_triton, "get_compute_capability", lambda device: 90)
    shape, m = TINY[0], TINY[0].model
    attention = load_kernel("triton", "block_attention").block_attention
    arrays = [
        jax.ShapeDtypeStruct((shape.requests, shape.rows, m.heads, m.head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.requests, shape.rows, 2, m.kv_heads, m.head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.num_pages, 2, m.kv_heads, shape.page_size, m.head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.requests, shape.pages_per_slot), jnp.int32),
        jax.ShapeDtypeStruct((shape.requests,), jnp.int32),
    ]
    traced = jax.jit(lambda *args: attention(*args, causal=True)).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call_ffi(") == text.count("custom_call") >= 1
