"""How kernels are launched: by jax_triton, or by XLA itself."""

from __future__ import annotations

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
    """Which of WAYS the environment asks for; jax_triton unless it does.  Declined: neither."""
    chosen = os.environ.get(CHOICE) or JAX_TRITON
    if chosen not in WAYS:
        raise Declined(f"{CHOICE}={chosen!r} is no way to launch Triton kernels (known: {', '.join(WAYS)})")
    return chosen
