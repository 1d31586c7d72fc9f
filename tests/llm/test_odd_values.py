"""Values that are allowed and odd: they act as they say, and harm nobody."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_jax import LLM, SamplingParams, UserError

from .pairs import generate_one

PROMPT = [5, 6]


@pytest.mark.parametrize(
    ("odd", "same"),
    [
        ({"top_k": 2**40}, {}),
        ({"top_p": 1e-50}, {"top_k": 1}),
        ({"min_p": 1e-320}, {"min_p": 1e-30}),
        ({"temperature": 1e300}, {"temperature": 1e15}),
        ({"temperature": 10**400}, {"temperature": 1e15}),
        ({"repetition_penalty": 1e-50}, {"repetition_penalty": 1e-20}),
        ({"max_new_tokens": 10**12, "min_tokens": 10**12}, {"max_new_tokens": 300, "min_tokens": 300}),
        ({"bad_token_ids": np.array([3, 32])}, {"bad_token_ids": [3, 32]}),
        ({"allowed_token_ids": (token for token in (3, 4, 5))}, {"allowed_token_ids": [3, 4, 5]}),
        ({"stop": np.array("x"), "ignore_eos": np.True_}, {"stop": "x", "ignore_eos": True}),
    ],
    ids=lambda asked: ",".join(asked),
)
def test_values_beyond_the_device_s_own_act_as_the_nearest(
    two_slots: LLM, odd: dict[str, Any], same: dict[str, Any]
) -> None:
    sampled = {"max_new_tokens": 6, "temperature": 1.0, "seed": 1}
    one, other = (generate_one(two_slots, PROMPT, **sampled | asked) for asked in (odd, same))
    assert one.token_ids == other.token_ids


@pytest.mark.parametrize("odd", [{"temperature": 1e39, "seed": 1}, {"repetition_penalty": 1e-50}])
def test_what_must_not_come_does_not_come_whatever_overflows(two_slots: LLM, odd: dict[str, Any]) -> None:
    bad = [5, 6, 3]
    out = generate_one(two_slots, PROMPT, max_new_tokens=12, bad_token_ids=bad, **odd)
    assert not set(bad) & set(out.token_ids)
    out = generate_one(two_slots, PROMPT, max_new_tokens=12, min_tokens=4, stop_token_ids=[5], **odd)
    assert 5 not in out.token_ids[:3]


@pytest.mark.parametrize("name", ["ignore_eos", "include_stop_str_in_output"])
@pytest.mark.parametrize("value", ["no", 0, None])
def test_switches_are_true_or_false(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{name} must be true or false, not {value!r}"):
        SamplingParams(**{name: value})  # pyright: ignore[reportArgumentType]
