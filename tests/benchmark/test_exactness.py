"""Equality with plain decoding."""

from __future__ import annotations

from dflash_jax.benchmark.ceiling import ModelCost, Rates
from dflash_jax.benchmark.exactness import Difference, exact_match, first_difference
from dflash_jax.benchmark.load import Level
from dflash_jax.benchmark.play import LevelResult, Outcome, add_ceilings, compare_with_plain

from .fakes import response


def test_the_first_difference():
    assert first_difference("k", [1, 2, 3], [1, 2, 3]) is None
    assert first_difference("k", [1, 2, 3], [1, 9, 3]) == Difference("k", 1, 2, 9)
    assert first_difference("k", [1, 2], [1, 2, 3]) == Difference("k", 2, None, 3)
    assert first_difference("k", [1, 2], [1]) == Difference("k", 1, 2, None)


def test_rate_by_tokens():
    plain = {key: response(key, token_ids=[1, 2]) for key in "abcd"}
    found = exact_match(plain, [response(key, token_ids=[1, 3 if key == "b" else 2]) for key in "abcd"])
    assert found is not None
    assert (found["rate"], found["compared"], found["of"]) == (0.75, 4, "tokens")
    assert [one.key for one in found["differences"]] == ["b"]


def test_rate_by_text_where_no_tokens_are_told():
    plain = {key: response(key, token_ids=[1], text=key) for key in "ab"}
    found = exact_match(plain, [response("a", text="a"), response("b", text="c")])
    assert found is not None
    assert (found["rate"], found["of"], found["differences"]) == (0.5, "text", [])
    assert exact_match(plain, [response("z", text="a")]) is None
    assert exact_match(plain, [response("a")]) is None


def outcome(name: str, speed: float, kernels: str = "xla", draft: str = "none", token: int = 1) -> Outcome:
    figures = {"output_throughput": speed}
    level = LevelResult(Level(concurrency=1), figures, [response("a", token_ids=[token])])
    return Outcome(name, {"kind": "dflash_jax", "draft": draft, "kernels": kernels}, [level])


def test_speed_up_is_over_plain_decoding_with_the_same_kernels():
    everyone = [outcome("plain x", 10), outcome("plain t", 20, "triton"), outcome("d", 60, "triton", "d", 2),
                outcome("other", 30, "pallas", "d")]  # fmt: skip
    compare_with_plain(everyone, synthetic=False)
    assert [one.levels[0].speedup for one in everyone] == [1, 1, 3, 3]
    assert [one.levels[0].exact["rate"] for one in everyone if one.levels[0].exact] == [1, 1, 0, 1]


def test_nothing_is_compared_without_plain_or_with_random_weights():
    alone = [outcome("d", 60, draft="d")]
    compare_with_plain(alone, synthetic=False)
    assert alone[0].levels[0].speedup is None and alone[0].levels[0].exact is None
    both = [outcome("plain", 10), outcome("d", 60, draft="d")]
    compare_with_plain(both, synthetic=True)
    assert both[1].levels[0].speedup == 6 and both[1].levels[0].exact is None


def test_the_reference_has_the_ceiling_of_the_engine_with_its_draft():
    cost = ModelCost(1000, 500, 2.0, 50, 100, 50, 200, 100, 1.0)
    shape = {"mean_input_len": 0, "mean_output_len": 0, "accept_length": 2.0, "rounds_by_width": {}}
    everyone = [outcome("reference", 5, draft="d"), outcome("server", 5), outcome("d", 9, draft="dflash:d")]
    everyone[0].facts |= {"kind": "reference", "block_size": 4}
    everyone[1].facts = {"kind": "server"}
    everyone[2].cost = cost
    for one in everyone:
        one.levels[0].figures |= shape
    add_ceilings(everyone, Rates(100.0, 1e12, "float32"))
    assert [one.levels[0].ceiling and one.levels[0].ceiling["round_ms"] for one in everyone] == [13_000, None, 10_000]
