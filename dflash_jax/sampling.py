"""What a request may ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

from dflash_jax.errors import UserError
from dflash_jax.state import MAX_STOP_IDS


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to decode one request.  Names as in vLLM; `max_new_tokens` as in SGLang.

    temperature 0 is greedy: then top_p, top_k, min_p and seed have no effect.  Above it, tokens are drawn from the
    model's distribution over temperature, cut by min_p, top_k and top_p in this order (as in vLLM).  The same `seed`
    gives the same tokens with any draft, block size or batch (float32); unset, one is drawn and reported.
    stop: texts that end the output and are cut from it.  stop_token_ids: ids that end it beside the model's own
    end-of-text tokens, which `ignore_eos` disregards.  UserError for a value out of range.
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

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken; temperatures under 1e-5 count as 0, as in vLLM."""
        return self.temperature < 1e-5

    def __post_init__(self) -> None:
        self._check_integers()
        self._check_numbers()
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        self._check_lists()
        for name in ("max_new_tokens", "top_k", "seed"):  # numpy's integers become Python's
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else int(value))
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids))

    def _check_integers(self) -> None:
        if not _is_integer(self.max_new_tokens) or self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be an integer of at least 1, not {self.max_new_tokens!r}")
        if not _is_integer(self.top_k) or self.top_k < -1:
            raise UserError(f"top_k must be a positive integer, or 0 for no limit, not {self.top_k!r}")
        if self.seed is not None and not _is_integer(self.seed):
            raise UserError(f"seed must be an integer, not {self.seed!r}")

    def _check_numbers(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise UserError(f"{name} must be a number, not {value!r}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be a number of at least 0, not {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p must be from 0 to 1, not {self.min_p!r}")

    def _check_lists(self) -> None:
        if not all(isinstance(text, str) and text for text in self.stop):
            raise UserError(f"stop must be texts of at least one character, not {list(self.stop)!r}")
        bad = [token for token in self.stop_token_ids if not _is_integer(token) or token < 0]
        if bad:
            raise UserError(f"stop_token_ids holds {bad[0]!r}, which is not a token id")
        if len(self.stop_token_ids) > MAX_STOP_IDS // 2:
            raise UserError(f"{len(self.stop_token_ids)} stop_token_ids are more than the {MAX_STOP_IDS // 2} allowed")


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """A list as a tuple; one thing as a tuple of one; None as none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
