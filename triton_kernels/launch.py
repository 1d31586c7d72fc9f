"""The one place that calls jax_triton, whose versions name an argument differently."""

from __future__ import annotations

import inspect
from typing import Any

import jax_triton as jt

_OUT = "out_type" if "out_type" in inspect.signature(jt.triton_call).parameters else "out_shape"


def launch(kernel: Any, *arrays: Any, out: Any, grid: tuple[int, ...], **options: Any) -> Any:
    """`kernel` over `grid` on arrays and then outputs shaped as `out`; options are constants and launch settings."""
    return jt.triton_call(*arrays, kernel=kernel, grid=grid, **{_OUT: out}, **options)
