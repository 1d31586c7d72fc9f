"""What a request may ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from dflash_jax.errors import UserError
from dflash_jax.ops import GREEDY_BELOW
from dflash_jax.state import MAX_STOP_IDS
from dflash_jax.structured import StructuredOutputs

MAX_LOGPROBS = 20  # alternatives with a token, as in vLLM
TOKEN_LISTS = ("stop_token_ids", "bad_token_ids", "allowed_token_ids", "logit_bias")
OPENAI_PENALTIES = ("presence_penalty", "frequency_penalty")
MAX_SAMPLES = 64


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to decode one request.  Names as in vLLM; `max_new_tokens` as in SGLang.

    temperature 0 is greedy: then top_p, top_k, min_p and seed have no effect.  Above it, tokens are drawn from the
    model's distribution over temperature, cut by min_p, top_k and top_p in this order (as in vLLM).  The same `seed`
    gives the same tokens with any draft, block size or batch (float32); unset, one is drawn and reported.
    stop: texts that end the output and are cut from it, unless `include_stop_str_in_output` (which keeps the text of
    an ending token too).  stop_token_ids: ids that end it beside the model's own end-of-text tokens, which
    `ignore_eos` disregards.  min_tokens: before so many, nothing of that ends it.  n: samples of one prompt; sample i
    has the seed `seed` + i.

    What changes the model's distribution first: allowed_token_ids (no others may come), bad_token_ids (these may not),
    logit_bias (added to a token's logit, up to ±100), then penalties for tokens that are there already:
    repetition_penalty divides the logits of those of prompt and output (if positive, else multiplies them; 1 = off),
    presence_penalty and frequency_penalty are subtracted from those of the output, once or as often as they are there.

    logprobs: log-probabilities of each token and of so many likeliest alternatives (0: of the token alone);
    prompt_logprobs: the same for the prompt, which is then not taken from the prefix cache.

    structured_outputs: the shape that the text must have; it ends when that is complete (or at max_new_tokens).

    UserError for a value out of range.
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
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken: very low temperatures count as 0, as in vLLM."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether it matters which tokens are there already."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def edits_logits(self) -> bool:
        """Whether the model's logits are changed before a token is chosen."""
        lists = self.logit_bias or self.allowed_token_ids is not None or self.bad_token_ids
        return self.penalised or bool(lists) or self.min_tokens > 0

    def __post_init__(self) -> None:
        self._check_integers()
        self._check_numbers()
        for name in ("stop", "stop_token_ids", "bad_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None or name != "allowed_token_ids":  # of which none given are not none allowed
                object.__setattr__(self, name, _as_tuple(value))
        self._check_switches()
        self._check_lists()
        self._make_plain()
        if self.structured_outputs is not None:
            self._check_structured(self.structured_outputs)

    def _check_structured(self, asked: Any) -> None:
        """The text must be able to go on as its shape wants, and to end when that is complete."""
        if not isinstance(asked, StructuredOutputs):
            raise UserError(f"structured_outputs must be StructuredOutputs(…), not {asked!r:.60}")
        against = {"ignore_eos": self.ignore_eos, "min_tokens": self.min_tokens > 0,
                   "allowed_token_ids": self.allowed_token_ids is not None,
                   "bad_token_ids": bool(self.bad_token_ids)}  # fmt: skip
        found = [name for name, given in against.items() if given]
        if found:
            raise UserError(f"structured_outputs cannot be combined with {' and '.join(found)}")

    def _make_plain(self) -> None:
        """numpy's integers become Python's, lists tuples."""
        for name in ("max_new_tokens", "top_k", "seed", "min_tokens", "n", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else int(value))
        for name in ("stop_token_ids", "bad_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else tuple(int(token) for token in value))
        if self.logit_bias is not None:
            bias = {int(token): float(value) for token, value in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", bias)

    def _check_integers(self) -> None:
        if not is_integer(self.max_new_tokens) or self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be an integer of at least 1, not {self.max_new_tokens!r}")
        if not is_integer(self.top_k) or self.top_k < -1:
            raise UserError(f"top_k must be a positive integer, or 0 for no limit, not {self.top_k!r}")
        if self.seed is not None and not is_integer(self.seed):
            raise UserError(f"seed must be an integer, not {self.seed!r}")
        if not is_integer(self.min_tokens) or not 0 <= self.min_tokens <= self.max_new_tokens:
            raise UserError(
                f"min_tokens must be from 0 to max_new_tokens, which is {self.max_new_tokens}, not {self.min_tokens!r}"
            )
        if not is_integer(self.n) or not 1 <= self.n <= MAX_SAMPLES:
            raise UserError(f"n must be an integer from 1 to {MAX_SAMPLES}, not {self.n!r}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (not is_integer(value) or not 0 <= value <= MAX_LOGPROBS):
                raise UserError(f"{name} must be an integer from 0 to {MAX_LOGPROBS}, not {value!r}")

    def _check_numbers(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", *OPENAI_PENALTIES):
            value = getattr(self, name)
            if not is_number(value):
                raise UserError(f"{name} must be a number, not {value!r}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be a number of at least 0, not {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p must be from 0 to 1, not {self.min_p!r}")
        if not 0 < self.repetition_penalty <= 10:
            raise UserError(f"repetition_penalty must be above 0 and at most 10, not {self.repetition_penalty!r}")
        for name in OPENAI_PENALTIES:
            if not -2 <= getattr(self, name) <= 2:
                raise UserError(f"{name} must be from -2 to 2, not {getattr(self, name)!r}")
        if self.n > 1 and self.greedy:
            raise UserError(f"n is {self.n}, and greedy decoding gives one output: set a temperature, or n to 1")

    def _check_switches(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output"):
            value = getattr(self, name)
            if not isinstance(value, (bool, np.bool_)):
                raise UserError(f"{name} must be true or false, not {value!r}")
            object.__setattr__(self, name, bool(value))

    def _check_lists(self) -> None:
        if self.logit_bias is not None:
            self._check_bias(self.logit_bias)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise UserError(f"stop must be texts of at least one character, not {list(self.stop)!r}")
        for name in TOKEN_LISTS:
            bad = [token for token in _as_tuple(getattr(self, name)) if not is_integer(token) or token < 0]
            if bad:
                raise UserError(f"{name} holds {bad[0]!r}, which is not a token id")
        if self.allowed_token_ids is not None:
            self._check_allowed(self.allowed_token_ids)
        if len(self.stop_token_ids) > MAX_STOP_IDS // 2:
            raise UserError(f"{len(self.stop_token_ids)} stop_token_ids are more than the {MAX_STOP_IDS // 2} allowed")

    @staticmethod
    def _check_bias(bias: Any) -> None:
        if not isinstance(bias, Mapping):
            raise UserError(f"logit_bias must map token ids to numbers, not be {bias!r:.60}")
        for token, value in bias.items():
            if not is_number(value) or not -100 <= value <= 100:
                raise UserError(f"logit_bias of token {token!r} must be a number from -100 to 100, not {value!r}")

    def _check_allowed(self, allowed: Sequence[int]) -> None:
        left = set(allowed) - set(self.bad_token_ids)
        if not left:
            raise UserError("allowed_token_ids and bad_token_ids together leave no token that may come")


def known_params(params: SamplingParams | None) -> SamplingParams:
    """The parameters, or the defaults for None; UserError for anything else."""
    if params is not None and not isinstance(params, SamplingParams):
        raise UserError(f"sampling parameters must be SamplingParams(…), not {params!r:.60}")
    return SamplingParams() if params is None else params


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """A list as a tuple; one thing as a tuple of one; None as none."""
    if value is None:
        return ()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
