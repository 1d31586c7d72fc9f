"""What is static in a step."""

from __future__ import annotations

import dataclasses

from dflash_jax.config import TargetConfig
from dflash_jax.drafters import Drafter
from dflash_jax.ops import XLA, Kernels


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """All that is static in a step: one compilation for each value and each shape of its arguments.

    Where a request samples, its drafts are chosen with the target's noise (`coupled`), at `draft_temperature` if given,
    or are the likeliest tokens (`argmax`).  The output is the same; acceptance is not.
    logprobs_mode: log-probabilities are of the target's own distribution (`raw_logprobs`) or of the one that tokens are
    drawn from (`processed_logprobs`), or the logits of either (`raw_logits`, `processed_logits`).
    """

    target: TargetConfig
    drafter: Drafter
    page_size: int
    kernels: Kernels = XLA
    draft_sampling: str = "coupled"
    draft_temperature: float | None = None
    logprobs_mode: str = "raw_logprobs"
