"""What a user may set about the engine: the defaults exist here once.  Names as in vLLM and SGLang."""

from __future__ import annotations

import dataclasses
from numbers import Real
from pathlib import Path

from dflash_jax.errors import UserError

DTYPES = ("auto", "float32", "bfloat16")
SPECULATION = ("auto", "always", "never")
DRAFT_SAMPLING = ("coupled", "argmax")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
# Where the device tells no memory size (CPU), the pools get this much; elsewhere a share of what is free.
CPU_KV_CACHE_BYTES = 512 * 1024**2
DEVICE_MEMORY_SHARE = 0.8


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine.  None means: chosen at start from the model and the machine, and printed.

    target, draft: folder, hub id or (target) `.gguf` file; a draft may also be a registered drafter, `NAME` or
    `NAME:ARGUMENT`, for example "ngram"; "none" = plain decoding.
    dtype: weights and KV; "auto" = float32 on CPU, bfloat16 elsewhere.
    block_size: rows of a block, 2 … the draft's own (vLLM's num_speculative_tokens is one less); if given, of every
    one, else the draft's own is the largest.
    speculation: "auto" = after `warmup`, if block_size is not given, each round has the width that measures fastest
    with the acceptance seen lately; "always" = every round has the whole block; "never" = the draft is not loaded.
    draft_sampling: where a request samples, drafts are drawn with the noise of the target's own draw ("coupled"), at
    draft_temperature if given, or are the likeliest tokens ("argmax").  Acceptance depends on it, the output never.
    speculative_token_map: JSON file with the token ids that a draft model may propose in rounds of greedy requests,
    whose head is then smaller; "auto" = on CPU the draft's own `token_map.json`, if it has one; "none" = all tokens.
    logprobs_mode: log-probabilities of the target's own distribution, or of the one that tokens are drawn from after
    all that the request asks for; or the logits of either.  Those of prompts are always the target's own.
    max_model_len: tokens of a request, prompt and output together.
    tensor_parallel_size: devices among which heads, MLPs, vocabulary and KV caches are divided.
    max_running_requests: requests decoded at once.
    min_decode_batch: rounds of fewer requests are padded to so many, of which none is compiled then.
    kv_cache_bytes: both pools together, on each device.
    chunked_prefill_size: prompt tokens of one prefill launch.
    weights_cache: folder for converted weights (a second start is then fast); None = no cache.
    """

    target: str
    draft: str = "none"
    dtype: str = "auto"
    block_size: int | None = None
    speculation: str = "auto"
    draft_sampling: str = "coupled"
    draft_temperature: float | None = None
    speculative_token_map: str | Path = "auto"
    logprobs_mode: str = "raw_logprobs"
    max_model_len: int | None = None
    kernels: str = "auto"
    tensor_parallel_size: int = 1
    max_running_requests: int = 8
    min_decode_batch: int = 1
    page_size: int = 16
    kv_cache_bytes: int | None = None
    chunked_prefill_size: int = 512
    enable_prefix_caching: bool = True
    overlap: bool = True
    weights_cache: str | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.speculation not in SPECULATION:
            raise UserError(f"speculation {self.speculation!r} is not one of {', '.join(SPECULATION)}")
        if self.draft_sampling not in DRAFT_SAMPLING:
            raise UserError(f"draft_sampling {self.draft_sampling!r} is not one of {', '.join(DRAFT_SAMPLING)}")
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise UserError(f"logprobs_mode {self.logprobs_mode!r} is not one of {', '.join(LOGPROBS_MODES)}")
        heat = self.draft_temperature
        if heat is not None and (isinstance(heat, bool) or not isinstance(heat, Real) or not 0 < heat < float("inf")):
            raise UserError(f"draft_temperature must be a number above 0, not {heat!r}")
        if not isinstance(self.speculative_token_map, str | Path) or not str(self.speculative_token_map):
            raise UserError(f"speculative_token_map must be a file, 'auto' or 'none', not"
                            f" {self.speculative_token_map!r}")  # fmt: skip
        for name in ("enable_prefix_caching", "overlap", "progress"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be true or false, not {getattr(self, name)!r}")
        for name, low in (("tensor_parallel_size", 1), ("max_running_requests", 1), ("min_decode_batch", 1),
                          ("page_size", 1), ("chunked_prefill_size", 1), ("max_model_len", 2),
                          ("kv_cache_bytes", 1)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < low):
                raise UserError(f"{name} must be an integer of at least {low}, not {value!r}")
        if self.block_size is not None and (type(self.block_size) is not int or self.block_size < 2):
            raise UserError(f"block_size must be an integer of at least 2, not {self.block_size!r}")
        if self.block_size is not None and self.speculation == "never":
            raise UserError(f"block_size {self.block_size} has no meaning with speculation 'never'")
        if self.min_decode_batch > self.max_running_requests:
            raise UserError(f"min_decode_batch {self.min_decode_batch} is above max_running_requests"
                            f" {self.max_running_requests}")  # fmt: skip
        if self.page_size & (self.page_size - 1):
            raise UserError(f"page_size {self.page_size} is not a power of two")
