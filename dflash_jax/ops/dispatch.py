"""The one dispatcher: which backend computes an op.

`select` turns the user's `--kernels` choice into a `Kernels` value, once, at start-up; it is hashable and a
static argument of every compiled step.  An explicit choice never falls back: what a backend does not have is
refused with a reason.  `auto` picks by platform and says what it picked.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from dflash_jax.errors import UserError
from dflash_jax.ops import reference
from dflash_jax.ops.kernel_packages import EXTRAS, kernel_names, load_kernel

CHOICES = ("auto", "xla", "pallas", "triton")

# The meaning of each op, in plain XLA.  A backend has kernels for some of them; the others are XLA's there, too.
REFERENCE: dict[str, Callable[..., Any]] = {
    "prepare_block": reference.prepare_block,
    "accept_bonus": reference.accept_bonus,
    "kv_inject": reference.kv_inject,
    "cache_write": reference.cache_write,
    "block_attention": reference.paged_attention,
    "prefill_attention": reference.paged_attention,
    "head_logits": reference.head_logits,
    "sample_tokens": reference.sample_tokens,
}
PLATFORMS = {"triton": "gpu", "pallas": "tpu"}  # where a backend's kernels run
PACKAGES = {"triton": "jax_triton", "pallas": "jax"}  # what they need


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The backend in use; `reason` says why and is printed at start-up.  Hashable by backend alone."""

    backend: str = "xla"
    reason: str = dataclasses.field(compare=False, default="")

    def __getattr__(self, op: str) -> Callable[..., Any]:
        """`kernels.block_attention(…)` calls this backend's implementation of the op."""
        if op not in REFERENCE:
            raise AttributeError(f"{op} is not an op (ops: {', '.join(REFERENCE)})")
        kernel = None if self.backend == "xla" else _kernel(self.backend, op)
        return REFERENCE[op] if kernel is None else kernel


@functools.cache
def _kernel(backend: str, op: str) -> Callable[..., Any] | None:
    return getattr(load_kernel(backend, op), op) if op in kernel_names(backend) else None


XLA = Kernels()


def backends(platform: str) -> tuple[str, ...]:
    """What can be used on `platform` (`cpu`, `gpu` or `tpu`) with the packages that are installed."""
    return ("xla", *(name for name in PLATFORMS if missing(name, platform) is None))


def missing(backend: str, platform: str) -> str | None:
    """Why `backend` cannot be used on `platform`; None if it can."""
    if not kernel_names(backend):
        return "there are none in this version yet"
    if platform != PLATFORMS[backend]:
        return f"they run on {PLATFORMS[backend]}, and the platform is {platform}"
    if importlib.util.find_spec(PACKAGES[backend]) is None:
        return f"the package {PACKAGES[backend]!r} is missing: pip install 'dflash-jax[{EXTRAS[backend]}]'"
    return None


def select(choice: str, platform: str) -> Kernels:
    """The backend for `choice` on `platform` (`cpu`, `gpu` or `tpu`).  UserError for one that cannot be had."""
    if choice not in CHOICES:
        raise UserError(f"kernels {choice!r} is not one of {', '.join(CHOICES)}")
    if choice == "auto":
        return _automatic(platform)
    if choice != "xla" and (reason := missing(choice, platform)):
        raise UserError(f"kernels {choice!r} cannot be used: {reason} (available: {', '.join(backends(platform))})")
    return Kernels(choice, f"kernels: {_described(choice)} (asked for)")


def _automatic(platform: str) -> Kernels:
    """The platform's own backend; XLA where there is none or it cannot be used, which is said."""
    for backend, home in PLATFORMS.items():
        if home == platform:
            reason = missing(backend, platform)
            chosen = backend if reason is None else "xla"
            why = "auto" if reason is None else f"auto; not {backend}: {reason}"
            return Kernels(chosen, f"kernels: {_described(chosen)} ({why})")
    return Kernels("xla", f"kernels: xla on {platform} (auto)")


def _described(backend: str) -> str:
    own = [op for op in REFERENCE if backend != "xla" and op in kernel_names(backend)]
    return f"{backend} for {', '.join(own)}, xla for the other ops" if own else backend
