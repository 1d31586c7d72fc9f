"""What a request may ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dflash_jax.errors import UserError
from dflash_jax.state import MAX_STOP_IDS


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to decode one request.  Names as in vLLM; `max_new_tokens` as in SGLang.

    temperature 0 is greedy, and all that this version serves: then top_p, top_k, min_p and seed have no effect.
    stop: texts that end the output and are cut from it.  stop_token_ids: ids that end it beside the model's own
    end-of-text tokens, which `ignore_eos` disregards.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_lists()
        self._check_numbers()

    def _check_lists(self) -> None:
        if not all(isinstance(text, str) and text for text in self.stop):
            raise UserError(f"stop must be texts of at least one character, not {self.stop!r}")
        if not all(type(token) is int and token >= 0 for token in self.stop_token_ids):
            raise UserError(f"stop_token_ids must be token ids, not {self.stop_token_ids!r}")
        if len(self.stop_token_ids) > MAX_STOP_IDS // 2:
            raise UserError(f"{len(self.stop_token_ids)} stop_token_ids are more than the {MAX_STOP_IDS // 2} allowed")

    def _check_numbers(self) -> None:
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be an integer of at least 1, not {self.max_new_tokens!r}")
        if not self.temperature >= 0:
            raise UserError(f"temperature must be at least 0, not {self.temperature!r}")
        if self.temperature > 0:
            raise UserError(f"temperature {self.temperature:g} is not served yet: this version decodes greedily (0)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p must be from 0 to 1, not {self.min_p!r}")
        if type(self.top_k) is not int or self.top_k < -1:
            raise UserError(f"top_k must be 0 (off) or a positive integer, not {self.top_k!r}")
