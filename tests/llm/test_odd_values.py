"""Values that are allowed and odd: they act as they say, and harm nobody."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_jax import LLM, EngineSettings, SamplingParams, UserError

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


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompt_ids": 5}, "prompt must be a list of token ids, not 5"),
        ({"prompt_ids": None}, "prompt must be a list of token ids, not None"),
        ({"prompt_ids": [True]}, "prompt holds True, which is not a token id from 0 to 70"),
        ({"params": {"max_new_tokens": 4}}, "sampling parameters must be SamplingParams(…), not {'max_new_tokens': 4}"),
        ({"priority": "high"}, "priority must be an integer, not 'high'"),
        ({"priority": float("nan")}, "priority must be an integer, not nan"),
        ({"request_id": ["a"]}, "request_id must be a text, not ['a']"),
        ({"eos_token_ids": [10**12]}, "eos_token_ids holds 1000000000000, which is not a token id"),
        ({"eos_token_ids": "a"}, "eos_token_ids holds 'a', which is not a token id"),
        ({"eos_token_ids": 2}, "eos_token_ids must be a list of token ids, not 2"),
    ],
)
def test_what_an_engine_refuses(two_slots: LLM, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        two_slots.engine.add_request(**{"prompt_ids": PROMPT} | asked)
    assert message in str(caught.value)
    assert not two_slots.engine.has_work


@pytest.mark.parametrize("prompt", [np.array(PROMPT), (np.int64(5), 6), (token for token in PROMPT)])
def test_ids_of_other_kinds_are_ids(two_slots: LLM, prompt: Any) -> None:
    params = SamplingParams(max_new_tokens=3)
    request = two_slots.engine.add_request(prompt, params)
    while two_slots.engine.has_work:
        two_slots.engine.step()
    assert request.output_ids == generate_one(two_slots, PROMPT, max_new_tokens=3).token_ids


@pytest.mark.parametrize("params", [5, "x", {"n": 2}, [None, {"n": 2}], [SamplingParams(), 5]])
def test_parameters_of_another_type(two_slots: LLM, params: Any) -> None:
    with pytest.raises(UserError, match=r"sampling parameters must be SamplingParams\(…\), not "):
        two_slots.generate([PROMPT, PROMPT], params)
    if not isinstance(params, list):
        with pytest.raises(UserError, match=r"sampling parameters must be SamplingParams\(…\), not "):
            two_slots.stream("hi", params)


@pytest.mark.parametrize(
    "option", [{"draft_temperature": "hot"}, {"draft_temperature": True}, {"overlap": "no"}, {"progress": 1},
               {"enable_prefix_caching": None}]
)  # fmt: skip
def test_settings_of_another_type(option: dict[str, Any]) -> None:
    [(name, value)] = option.items()
    with pytest.raises(UserError, match=f"{name} must be .*, not {value!r}"):
        EngineSettings(target="unread", **option)
