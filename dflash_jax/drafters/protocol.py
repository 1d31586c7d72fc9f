"""What a drafter is: who proposes the tokens of a block, declared by capability and never by name.

A drafter is a small hashable description, static in every compiled step.  Its arrays live elsewhere: what is only
read in `Weights.draft`, what rounds change in `DecodeState.draft`.  docs/DRAFTERS.md tells how to write one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jax import Array
from jax.sharding import Mesh

from dflash_jax.models import Rows
from dflash_jax.params import Params


class Weights(NamedTuple):
    """Everything read-only that a step needs: the target's parameters and the drafter's (or None)."""

    target: Params
    draft: Params


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a drafter needs of the engine, which asks for nothing else.

    needs_hidden: taps of the target are captured and absorbed; needs_cpu_lengths: its steps call the host, which must
    know exact lengths before each round: rounds are then not overlapped.  What it keeps for each token is told by
    `Drafter.page_bytes`.
    """

    needs_hidden: bool = False
    needs_cpu_lengths: bool = False


@runtime_checkable
class Drafter(Protocol):
    """Proposes blocks and absorbs what was committed.

    Hashable, and equal to another one only if its steps compute the same: compiled steps are kept by it.  `draft`
    and `absorb` are traced, once for each shape of their arguments; no shape may depend on a value, and nothing may
    be read back to the host.  Whatever they do, the output is the target's own: a poor drafter only costs time.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What it needs of the engine."""
        ...

    @property
    def max_block(self) -> int:
        """Largest block size B, the bonus token included; 1 means that nothing is ever drafted."""
        ...

    @property
    def mask_id(self) -> int:
        """Token id that fills rows 1 … B − 1 before `draft`; within the target's vocabulary."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs `absorb` wants, in that order; () without `needs_hidden`."""
        ...

    def page_bytes(self, page_size: int, dtype: Any) -> int:
        """Bytes that `init_cache` takes for each page, over all devices together; 0 if it keeps nothing of tokens."""
        ...

    def init_cache(self, num_pages: int, page_size: int, dtype: Any, mesh: Mesh) -> Any:
        """Its state, a pytree of arrays on `mesh`; every step that changes it gets its buffers donated.

        What belongs to a token is kept by location (page · page_size + offset): a page may be shared by requests with
        the same prefix, and steps see no slots.  Page 0 takes writes that must have no effect; never read it.
        """
        ...

    def draft(self, weights: Weights, cache: Any, rows: Rows) -> Array:
        """int32 [S, B − 1]: the tokens proposed after the bonus, at positions rows.positions[:, 1:].

        rows.ids [S, B] = [bonus, mask_id × (B − 1)] with 2 ≤ B ≤ max_block, which may differ from round to round;
        rows.lengths [S] committed tokens, 0 for a row nobody waits for; rows.page_table [S, W] tells where they are.
        The bonus itself stands at position rows.lengths and has not been absorbed.
        """
        ...

    def absorb(self, weights: Weights, cache: Any, taps: Array, rows: Rows) -> Any:
        """The cache with committed tokens added: rows.ids [S, T] at rows.locations [S, T].

        Called after every prefill chunk (T = its bucket) and every round (T = B, also for B = 1), with
        taps [S, T, K·H] for the K layers of `taps`.  Rows that are not committed have locations in page 0.
        """
        ...
