"""The demo target through the command line against what transformers decodes from the same file (tests/data)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from llm.pairs import open_llm  # pyright: ignore[reportMissingImports]

import dflash_jax.llm

from .conftest import Cli

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text(encoding="utf-8"))
}
CHATS = ["sum", "turns"]


@pytest.fixture
def demo(cli: Cli, demo_target: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli` for a run without --target; the model is opened once, without a draft, one prompt at a time."""

    def open_demo(target: None, draft: str, **options: Any) -> Any:
        assert (target, draft, options.pop("progress"), options.pop("platform")) == (None, "none", False, None)
        return open_llm(demo_target, draft, light=False, max_running_requests=1, **options)

    monkeypatch.setattr(dflash_jax.llm, "LLM", open_demo)
    return lambda *argv, **options: cli("--draft", "none", *argv, **options)


def check(found: dict[str, Any], case: dict[str, Any]) -> None:
    assert found["prompt_tokens"] == len(case["prompt_ids"])
    assert found["token_ids"] == case["token_ids"]
    assert (found["text"], found["finish_reason"]) == (case["text_out"], case["finish_reason"])
    assert found["accept_lengths"] == [1] * (len(case["token_ids"]) - 1)
    assert found["mean_accept_length"] == 1.0


def run_alike(demo: Cli, cases: Iterable[dict[str, Any]], *argv: object, stdin: bytes = b"") -> None:
    """Cases of one limit in one run."""
    cases = list(cases)
    [limit] = {case["max_new_tokens"] for case in cases}
    result = demo(*argv, "--json", "--max-new-tokens", limit, stdin=stdin)
    assert result.code == 0
    for found, case in zip(result.objects, cases, strict=True):
        check(found, case)


@pytest.mark.slow
def test_chats(demo: Cli) -> None:
    cases = [CASES[name] for name in CHATS]
    lines = [json.dumps({"messages": case["messages"]}) for case in cases]
    run_alike(demo, cases, "--prompts-file", "-", stdin="\n".join(lines).encode())


@pytest.mark.slow
def test_a_text_is_a_chat_unless_raw(demo: Cli) -> None:
    """The file's template begins with a system message of its own."""
    run_alike(demo, [CASES["sky"]], CASES["sky"]["messages"][0]["content"])
    system, user = (message["content"] for message in CASES["system"]["messages"])
    run_alike(demo, [CASES["system"]], user, "--system", system)
    run_alike(demo, [CASES["raw-text"]], CASES["raw-text"]["text"], "--raw")


@pytest.mark.slow
def test_ids(demo: Cli) -> None:
    run_alike(demo, [CASES["one-token"]], "--prompt-ids", CASES["one-token"]["prompt_ids"][0])


@pytest.mark.slow
def test_text_without_json(demo: Cli) -> None:
    case = CASES["sum"]
    result = demo(case["messages"][0]["content"])
    assert (result.code, result.out) == (0, case["text_out"] + "\n")
    assert "mean acceptance 1.00" in result.err.splitlines()[-1]
