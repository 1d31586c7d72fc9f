"""How kernels are launched: by XLA itself, or by jax_triton."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

from . import Declined

CHOICE = "DFLASH_JAX_TRITON"
JAX_TRITON, XLA = WAYS = ("jax_triton", "xla")


def launch(kernel: Any, *arrays: Any, **options: Any) -> Any:
    """`kernel` over `grid` on arrays and then outputs shaped as `out`; options are constants and launch settings."""
    if way() == XLA:
        from . import by_xla

        return by_xla.launch(kernel, *arrays, **options)
    from . import by_jax_triton  # not before: it needs a package that the other does without

    return by_jax_triton.launch(kernel, *arrays, **options)


def way() -> str:
    """Which of WAYS: what the environment asks for, else XLA unless it takes no kernels here.  Declined: neither."""
    chosen = os.environ.get(CHOICE) or _automatic()
    if chosen not in WAYS:
        raise Declined(f"{CHOICE}={chosen!r} is no way to launch Triton kernels (known: {', '.join(WAYS)})")
    return chosen


def missing() -> str | None:
    """The package that is needed and not installed; None: kernels can be launched."""
    if importlib.util.find_spec("triton") is None:
        return "triton"
    return None if way() == XLA or importlib.util.find_spec("jax_triton") is not None else "jax_triton"


def described() -> str:
    """The way, and why it is not XLA's where that was tried."""
    if way() == XLA:
        return "launched by XLA"
    reason = None if os.environ.get(CHOICE) else _xlas_refusal()
    return "launched by jax_triton" + (f", since XLA does not take them ({reason})" if reason else "")


def _automatic() -> str:
    return XLA if _xlas_refusal() is None else JAX_TRITON


@functools.cache
def _xlas_refusal() -> str | None:
    """Why XLA launches no kernels on the GPU at hand; None: it does, or there is none to ask."""
    from . import by_xla

    return by_xla.refusal()
