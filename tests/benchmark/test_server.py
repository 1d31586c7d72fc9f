"""Servers whose times are known, and servers that misbehave."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from dflash_jax.benchmark.contender import Ask, ContenderError
from dflash_jax.benchmark.encoding import Codec
from dflash_jax.benchmark.load import Level
from dflash_jax.benchmark.play import LevelResult, Outcome, Plan, play
from dflash_jax.benchmark.server_contender import ServerContender, ServerOptions, parse_counters, take_sglang
from dflash_jax.benchmark.workloads import Item, Workload

from .fake_server import Manner, metrics_text, serving
from .fakes import response

ASK = Ask("one", [{"role": "user", "content": "hello"}], 7)
IDS = Ask("two", [1, 2, 3], 7, ignore_eos=True)


def contender(url: str, **options: Any) -> ServerContender:
    return ServerContender(ServerOptions("fake", url, **{"timeout_s": 5.0, **options}))


def answered(url: str, ask: Ask = ASK, codec: Codec | None = None, **options: Any) -> Any:
    async def talk() -> Any:
        one = ServerContender(ServerOptions("fake", url, **{"timeout_s": 5.0, **options}), codec)
        try:
            await one.open()
            return await one.generate(ask)
        finally:
            await one.close()

    return asyncio.run(talk())


def measured(manner: Manner, requests: int = 4, at_once: int = 2) -> tuple[LevelResult, Any]:
    items = tuple(Item(f"i{i}", [{"role": "user", "content": "x"}], 7) for i in range(requests))
    plan = Plan(Workload("fake", items), (Level(concurrency=at_once),), requests)
    outcome = Outcome("fake")
    with serving(manner) as (url, seen):
        asyncio.run(play([contender(url)], plan, [outcome]))
    assert outcome.error is None
    return outcome.levels[0], seen


def test_a_fast_and_a_slow_server_get_the_figures_they_have():
    """Waits can be longer than asked for, never shorter."""
    fast, _ = measured(Manner(first_s=0.01, gap_s=0.01))
    slow, seen = measured(Manner(first_s=0.2, gap_s=0.15))
    assert seen.most_at_once == 2
    for level, first_s, gap_s in ((fast, 0.01, 0.01), (slow, 0.2, 0.15)):
        figures = level.figures
        assert figures["completed"] == 4
        assert figures["total_output_tokens"] == 28 and figures["total_input_tokens"] == 20
        ideal = {"ttft": first_s, "itl": gap_s, "tpot": 2 * gap_s / 6, "e2el": first_s + 2 * gap_s}
        for name, seconds in ideal.items():
            found = figures[f"median_{name}_ms"]
            assert seconds * 990 <= found <= seconds * 1000 + 90, (name, found)
        assert figures["output_throughput"] <= 2 * 7 / (first_s + 2 * gap_s) * 1.01
    assert slow.figures["output_throughput"] == pytest.approx(28, rel=0.25)
    assert fast.figures["output_throughput"] > 3 * slow.figures["output_throughput"]


def test_vllms_counters_give_the_acceptance_of_this_run_alone():
    level, _ = measured(Manner(pieces=(1, 3, 3)))
    assert level.figures["accept_length"] == 3.0  # the 100 rounds from before had 1.5
    assert level.figures["acceptance_rate_per_pos"] == [1.0, 0.5]


def test_a_server_without_counters_has_no_acceptance():
    level, _ = measured(Manner(counters=False))
    assert level.figures["accept_length"] is None


def test_what_is_sent_to_an_openai_server():
    with serving(Manner()) as (url, seen):
        found = answered(url, ASK)
        answered(url, IDS)
    (chat, body), (text, other) = seen.bodies
    assert (chat, text) == ("/v1/chat/completions", "/v1/completions")
    assert body["messages"] == ASK.prompt and body["max_tokens"] == 7 and body["model"] == "served-model"
    assert body["stream"] and body["stream_options"] == {"include_usage": True} and "ignore_eos" not in body
    assert other["prompt"] == [1, 2, 3] and other["ignore_eos"] is True
    assert (found.text, found.output_tokens, found.prompt_tokens, found.finish_reason) == ("x" * 7, 7, 5, "length")
    assert found.token_ids is None and len(found.piece_s) == 3


def test_vllm_tells_token_ids():
    with serving(Manner(ids=True)) as (url, seen):
        assert answered(url).token_ids == [0, 1, 1, 1, 2, 2, 2]
    assert seen.bodies[0][1]["return_token_ids"] is True
    with serving(Manner()) as (url, seen):
        answered(url)
    assert "return_token_ids" not in seen.bodies[0][1]


def test_sglang_may_send_new_ids_alone():
    one = response(tokens=0, pieces=())
    for tokens, ids in ((1, [5]), (3, [6, 7]), (4, [8])):
        take_sglang(one, {"output_ids": ids, "meta_info": {"completion_tokens": tokens}}, 0.0)
    assert one.token_ids == [5, 6, 7, 8] and one.output_tokens == 4


def test_sglang_tells_tokens_and_acceptance():
    manner = Manner(api="sglang", told={"spec_verify_ct": 2})
    with serving(manner) as (url, seen):
        found = answered(url, IDS)
    path, body = seen.bodies[0]
    assert path == "/generate" and body["input_ids"] == [1, 2, 3] and body["sampling_params"]["max_new_tokens"] == 7
    assert found.token_ids == list(range(7)) and found.output_tokens == 7 and found.prompt_tokens == 5
    assert found.accept_length == 3.5
    assert len(found.piece_s) == 3
    with serving(Manner(api="sglang", told={"spec_accept_length": 6.25, "spec_verify_ct": 2})) as (url, _):
        assert answered(url, IDS).accept_length == 6.25


def test_meta_info_in_an_openai_answer():
    told = {"meta_info": {"spec_accept_length": 4.5}}
    with serving(Manner(told=told)) as (url, _):
        assert answered(url).accept_length == 4.5


def test_counters_are_added_over_engines():
    text = metrics_text(type("Seen", (), {"drafts": 4, "accepted": 6})())
    both = parse_counters(text + text.replace('"m"', '"n"'))
    assert both is not None
    assert (both.drafts, both.draft_tokens, both.accepted_tokens) == (8, 32, 12)
    assert (list(both.proposed_per_pos), list(both.accepted_per_pos)) == ([8, 8], [8, 4])
    assert parse_counters("vllm:num_requests_running 3.0\n") is None


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("garbage", "/v1/chat/completions streams something that is no event: '<html>busy</html>'"),
        ("not json", "/v1/chat/completions streams an event that is no JSON: '{oops'"),
        ("error", "/v1/chat/completions gives up: {\"message\": \"out of memory\"}"),
        ("status", "/v1/chat/completions answers 503: out of order"),
        ("cut", "/v1/chat/completions ended in the middle of an answer, without a finish_reason"),
    ],
)
def test_a_server_that_misbehaves_is_told_in_a_sentence(fault, told):
    with serving(Manner(fault=fault)) as (url, _), pytest.raises(ContenderError) as caught:
        answered(url)
    assert str(caught.value) == f"server fake ({url}): {told}"


def test_a_server_that_hangs():
    with serving(Manner(fault="hang")) as (url, _), pytest.raises(ContenderError, match="no answer within 0.3 s"):
        answered(url, timeout_s=0.3)


def test_a_server_that_refuses():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ContenderError, match="server fake .*: .*[Cc]onnect"):
            answered(url)


class Words:
    """A tokenizer of one token per two letters."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [0] * (len(text) // 2)


def test_tokens_are_counted_here_where_no_usage_is_told():
    codec: Any = Codec(Words())  # pyright: ignore[reportArgumentType]
    with serving(Manner(pieces=(2, 4, 6), usage=False)) as (url, _):
        assert answered(url, codec=codec).output_tokens == 6
        with pytest.raises(ContenderError, match="tells no usage, and no tokenizer is known to count tokens"):
            answered(url)


def test_an_answer_without_text():
    with serving(Manner(pieces=(0,))) as (url, _), pytest.raises(ContenderError, match="ended without any text"):
        answered(url)


def test_another_form():
    with serving(Manner(told={"choices": [7]})) as (url, _), pytest.raises(ContenderError, match="in an unknown form"):
        answered(url)


def test_no_model_is_listed():
    with serving(Manner()) as (url, _), pytest.raises(ContenderError, match="/v1/models answers 404"):
        answered(url + "/elsewhere")
