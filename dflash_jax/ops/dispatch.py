"""The one dispatcher: which backend computes an op.

`select` turns the user's `--kernels` choice into a `Kernels` value, once, at start-up; it is hashable and a
static argument of every compiled step.  An explicit choice never falls back: what a backend does not have is
refused with a reason.  `auto` picks by platform and says what it picked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from dflash_jax.errors import UserError
from dflash_jax.ops import reference

CHOICES = ("auto", "xla", "pallas", "triton")

# op -> backend -> implementation. The `xla` column is the meaning of the op.
TABLE: dict[str, dict[str, Callable[..., Any]]] = {
    "prepare_block": {"xla": reference.prepare_block},
    "accept_bonus": {"xla": reference.accept_bonus},
    "kv_inject": {"xla": reference.kv_inject},
    "cache_write": {"xla": reference.cache_write},
    "block_attention": {"xla": reference.paged_attention},
    "prefill_attention": {"xla": reference.paged_attention},
    "head_logits": {"xla": reference.head_logits},
    "sample_tokens": {"xla": reference.sample_tokens},
}


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The backend in use; `reason` says why and is printed at start-up.  Hashable by backend alone."""

    backend: str = "xla"
    reason: str = dataclasses.field(compare=False, default="")

    def __getattr__(self, op: str) -> Callable[..., Any]:
        """`kernels.block_attention(…)` calls this backend's implementation of the op."""
        if op not in TABLE:
            raise AttributeError(f"{op} is not an op (ops: {', '.join(TABLE)})")
        return TABLE[op][self.backend]


XLA = Kernels()


def backends() -> tuple[str, ...]:
    """Backends that implement every op."""
    return tuple(b for b in CHOICES[1:] if all(b in row for row in TABLE.values()))


def select(choice: str, platform: str) -> Kernels:
    """The backend for `choice` on `platform` (`cpu`, `gpu` or `tpu`)."""
    if choice not in CHOICES:
        raise UserError(f"kernels {choice!r} is not one of {', '.join(CHOICES)}")
    if choice == "auto":
        return Kernels("xla", f"kernels: xla on {platform} (auto; no other backend has kernels in this version)")
    if choice not in backends():
        raise UserError(f"kernels {choice!r} are not in this version yet (available: auto, {', '.join(backends())})")
    return Kernels(choice, f"kernels: {choice} on {platform} (asked for)")
