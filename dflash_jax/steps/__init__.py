"""The steps of decoding: pure functions over `Weights` and `DecodeState`.

`rounds` holds the speculative round, `chunks` prefill, `slots` what the host changes between launches; `Steps` jits all
of them, with what they change of the state donated.  Axis letters as in `axes`.
"""

from dflash_jax.state import NOTHING
from dflash_jax.steps.chunks import PrefillBatch, prefill
from dflash_jax.steps.compiled import Steps
from dflash_jax.steps.config import StepConfig
from dflash_jax.steps.report import with_logprobs
from dflash_jax.steps.rounds import (
    Verified,
    accept,
    accept_block,
    commit,
    decode_round,
    draft,
    prepare,
    propose,
    publish,
    verify,
    verify_block,
)
from dflash_jax.steps.slots import Admission, admit, edit, extend, finish

__all__ = [
    "NOTHING", "Admission", "PrefillBatch", "StepConfig", "Steps", "Verified", "accept", "accept_block", "admit",
    "commit", "decode_round", "draft", "edit", "extend", "finish", "prefill", "prepare", "propose", "publish", "verify",
    "verify_block", "with_logprobs",
]  # fmt: skip
