"""The distribution of the first three tokens, with every option and every drafter, against all texts enumerated.

20,000 seeds each; a p-value of the whole texts and of each place.  The seeds are fixed, so nothing here is flaky.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import SamplingParams
from dflash_jax.drafters import Weights
from dflash_jax.engine.packing import needs_of
from dflash_jax.ops import FILTER
from dflash_jax.ops.dispatch import REFERENCE
from dflash_jax.state import Needs
from dflash_jax.steps import StepConfig, Steps

from .bigram import NEW, PAGE, Draws, draw, enumerated, make_drafter, p_values, run, target_config, target_params

LEAST_P = 1e-3
EVERYTHING = Needs(FILTER, edits=True)  # one compilation of each drafter serves all options
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 2, "temperature": 1.3},
    "top_p (CASE 11)": {"top_p": 0.75, "temperature": 0.5},
    "min_p": {"min_p": 0.45},
    "all filters": {"min_p": 0.15, "top_k": 3, "top_p": 0.8, "temperature": 1.2},
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": -0.5},
    "all penalties": {"repetition_penalty": 0.7, "presence_penalty": -0.4, "frequency_penalty": 0.6},
    "bias": {"logit_bias": {0: 0.7, 3: -1.5}},
    "allowed": {"allowed_token_ids": [0, 2, 3]},
    "bad": {"bad_token_ids": [1]},
    "stop": {"stop_token_ids": [2]},
    "min_tokens": {"stop_token_ids": [2, 3], "min_tokens": 2},
    "all at once": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3, "presence_penalty": 0.3,
                    "logit_bias": {3: 1.0}, "bad_token_ids": [0], "stop_token_ids": [1], "min_tokens": 1},
}  # fmt: skip
DRAFTERS = ("ngram", "v1-coupled", "v1-argmax", "v2-coupled", "v2-argmax", "right", "wrong")


def params_of(option: str) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": NEW, "temperature": 1.0, **OPTIONS[option]})


@functools.cache
def plain(option: str, vocab: int = 4) -> Draws:
    return draw("none", vocab, params_of(option), needs=EVERYTHING)


@pytest.mark.slow
def test_plain_decoding_draws_from_the_definition() -> None:
    for option in OPTIONS:
        found = p_values(plain(option).texts, enumerated(4, params_of(option)))
        assert min(found) > LEAST_P, f"{option}: {found}"
        assert plain(option).acceptance == 1


@pytest.mark.slow
@pytest.mark.parametrize("option", ["plain", "top_p (CASE 11)", "all penalties", "all at once"])
def test_steps_compiled_for_less_draw_the_same(option: str) -> None:
    params = params_of(option)
    np.testing.assert_array_equal(draw("none", 4, params, needs=needs_of(params)).texts, plain(option).texts)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_draws_from_the_definition(drafter: str) -> None:
    """The same texts as without a draft, for that matter, and acceptance is what the draft makes it."""
    acceptance = {}
    for option in OPTIONS:
        told = plain(option).texts if drafter in ("right", "wrong") else None
        drawn = draw(drafter, 4, params_of(option), told, needs=EVERYTHING)
        found = p_values(drawn.texts, enumerated(4, params_of(option)))
        assert min(found) > LEAST_P, f"{option}: {found}"
        np.testing.assert_array_equal(drawn.texts, plain(option).texts, err_msg=option)
        check_first_rounds(drafter, option, drawn)
        acceptance[option] = drawn.acceptance
    if drafter not in ("right", "wrong"):
        assert sum(acceptance.values()) / len(acceptance) > 1.02, acceptance


def check_first_rounds(drafter: str, option: str, drawn: Draws) -> None:
    """Of texts with all their tokens: the second and third come in one round where the draft of the second is right."""
    whole = (drawn.texts < 4).all(axis=1)
    texts, both = drawn.texts[whole], drawn.first[whole] == 2
    assert (both | (drawn.first[whole] == 1)).all()
    if drafter == "right":
        assert both.all()
    elif drafter == "wrong":
        assert not both.any()
    elif not drafter.endswith("coupled"):  # the draft depends on what is there alone, and not on the seed
        for first in range(4):
            accepted = {*texts[both & (texts[:, 0] == first), 1]}
            assert len(accepted) <= 1, f"{option}: after {first} all of {accepted} were accepted"
            assert both[(texts[:, 0] == first) & np.isin(texts[:, 1], [*accepted])].all()


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "v2-coupled"])
def test_sixteen_tokens(drafter: str) -> None:
    params = SamplingParams(max_new_tokens=NEW, temperature=0.9, top_k=9, top_p=0.9, min_p=0.1,
                            frequency_penalty=0.4, logit_bias={5: 1.5, 6: 1.5}, bad_token_ids=[3])  # fmt: skip
    drawn = draw(drafter, 16, params)
    assert min(p_values(drawn.texts, enumerated(16, params))) > LEAST_P
    assert (drawn.acceptance > 1.02) == (drafter != "none")


# -- what the test can see ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_expectation_that_is_off_by_two_per_cent_is_noticed() -> None:
    joint = enumerated(4, params_of("plain"))
    chance = joint[0].sum()
    moved = joint * (1 - 0.02 / (1 - chance))
    moved[0] = joint[0] * (1 + 0.02 / chance)
    assert abs(moved.sum() - 1) < 1e-9 and abs(moved[0].sum() - chance - 0.02) < 1e-9
    whole, *places = p_values(plain("plain").texts, moved)
    assert places[0] < LEAST_P < min(p_values(plain("plain").texts, joint))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a_sampler_that_is_off_by_two_per_cent_is_noticed(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 0 comes two times in a hundred more often than it should, at every place."""
    monkeypatch.setitem(REFERENCE, "sample_tokens", functools.partial(biased, REFERENCE["sample_tokens"]))
    made, draft_params = make_drafter(drafter, 4)
    steps = Steps(StepConfig(target_config(4), made, PAGE))
    drawn = run(steps, Weights(target_params(4), draft_params), params_of("plain"), needs_of(params_of("plain")))
    found = p_values(drawn.texts, enumerated(4, params_of("plain")))
    assert max(found) < LEAST_P, found


def biased(sample_tokens: Any, logits: jax.Array, *rest: Any) -> jax.Array:
    """The sampler at temperature 1 with its first token's probability 0.02 too high."""
    chance = jax.nn.softmax(logits, axis=-1)[..., 0]
    raised = jax.scipy.special.logit(chance + 0.02) - jax.scipy.special.logit(chance)
    return sample_tokens(logits.at[..., 0].add(jnp.where(chance < 0.97, raised, 0)), *rest)


def test_what_cannot_come_must_not_have_come() -> None:
    joint = enumerated(4, params_of("bad"))
    assert abs(joint.sum() - 1) < 1e-9 and joint[1].sum() == 0
    assert p_values(np.array([[0, 2, 3], [0, 1, 3]]), joint)[0] == 0


def test_the_case_of_top_p_before_temperature_would_be_another_distribution() -> None:
    """CASE 11: with the order turned round three tokens were left instead of two."""
    assert (enumerated(4, params_of("top_p (CASE 11)")).sum(axis=(1, 2)) > 0).sum() == 2
    assert (enumerated(4, SamplingParams(temperature=1.0, top_p=0.75)).sum(axis=(1, 2)) > 0).sum() == 3
