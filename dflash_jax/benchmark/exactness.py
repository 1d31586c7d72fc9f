"""Whether answers equal plain decoding's, and how close the call was where they first differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.benchmark.contender import Ask, Response
from dflash_jax.benchmark.engine_contender import Served, sampling_params

MOST_GAPS = 20  # differences whose logit gap is looked at


@dataclasses.dataclass
class Difference:
    """The first token that is not plain decoding's: position in the answer, both tokens (None: it had ended).

    logit_gap: by how much the target prefers plain decoding's token to the other there, in logits.
    """

    key: str
    position: int
    plain: int | None
    other: int | None
    logit_gap: float | None = None


def first_difference(key: str, plain: Sequence[int], other: Sequence[int]) -> Difference | None:
    for position in range(max(len(plain), len(other))):
        pair = [one[position] if position < len(one) else None for one in (plain, other)]
        if pair[0] != pair[1]:
            return Difference(key, position, *pair)
    return None


def exact_match(plain: Mapping[str, Response], responses: Sequence[Response]) -> dict[str, Any] | None:
    """{"rate", "compared", "of": "tokens" or "text", "differences"}; None where there is nothing to compare.

    Servers that do not tell token ids are compared by text.
    """
    pairs = [(plain[one.key], one) for one in responses if one.key in plain]
    by_ids = [(a, b) for a, b in pairs if a.token_ids is not None and b.token_ids is not None]
    if by_ids:
        found = [first_difference(b.key, a.token_ids or [], b.token_ids or []) for a, b in by_ids]
        differences = [one for one in found if one]
        return _rate(len(by_ids), len(differences), "tokens", differences)
    by_text = [(a, b) for a, b in pairs if a.text is not None and b.text is not None]
    if by_text:
        return _rate(len(by_text), sum(a.text != b.text for a, b in by_text), "text", [])
    return None


def _rate(compared: int, different: int, of: str, differences: list[Difference]) -> dict[str, Any]:
    return {"rate": 1 - different / compared, "compared": compared, "of": of, "differences": differences}


def measure_gaps(served: Served, asks: Mapping[str, Ask], plain: Mapping[str, Response],
                 differences: Sequence[Difference]) -> None:  # fmt: skip
    """Fill in `logit_gap` of the first few differences: the target scores both tokens after what they share."""
    for one in differences[:MOST_GAPS]:
        ask, answer = asks.get(one.key), plain[one.key].token_ids or []
        if ask is None or one.plain is None or one.other is None:
            continue
        before = [*served.codec.encode(ask.prompt), *answer[: one.position]]
        scores = [_logprob(served, [*before, token], ask) for token in (one.plain, one.other)]
        one.logit_gap = scores[0] - scores[1]


def _logprob(served: Served, ids: list[int], ask: Ask) -> float:
    """Log-probability of the last of `ids`; of two tokens at one place these differ as their logits do."""
    params = dataclasses.replace(sampling_params(ask), max_new_tokens=1, prompt_logprobs=0)
    for update in served.engine.generate(ids, params):
        if update.finish_reason is not None:
            return float(update.request.prompt_logprobs[-1].logprob)
    raise RuntimeError("a request ended without a last update")
