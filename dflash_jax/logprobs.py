"""Log-probabilities as `LLM` reports them: by token, vLLM's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_jax.engine.protocol import TokenLogprobs
from dflash_jax.text import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """rank 1 is the likeliest; decoded_token: the token's own text, None without a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def by_token(token: int, found: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The token at its position and the likeliest alternatives, the likeliest first."""

    def one(token: int, value: float, rank: int) -> Logprob:
        return Logprob(value, rank, tokenizer.backend.decode([token], skip_special_tokens=False) if tokenizer else None)

    alternatives = zip(found.top_ids, found.top_logprobs, strict=True)
    top = {other: one(other, value, rank) for rank, (other, value) in enumerate(alternatives, 1)}
    return top | {token: one(token, found.logprob, found.rank)}


def by_position(
    tokens: Sequence[int], found: Sequence[TokenLogprobs], tokenizer: Tokenizer | None
) -> list[dict[int, Logprob]]:
    return [by_token(token, one, tokenizer) for token, one in zip(tokens, found, strict=True)]
