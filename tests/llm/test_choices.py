"""What is opened when something is left out, and what is said about it.  No model is loaded here."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import dflash_jax.llm
from dflash_jax.llm import choose_pair


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """The demo draft that this version has: set its only entry."""
    draft: list[Path | None] = [None]
    monkeypatch.setattr(dflash_jax.llm, "demo_target_path", lambda progress: Path(f"/demo/target-{progress}"))
    monkeypatch.setattr(dflash_jax.llm, "demo_draft_path", lambda: draft[0])
    return draft


def test_nothing_given(shipped: list[Path | None], caplog: pytest.LogCaptureFixture) -> None:
    assert choose_pair(None, None) == ("/demo/target-True", "none")
    assert caplog.messages == ["the demo draft is not trained yet: decoding without a draft"]
    shipped[0] = Path("/demo/draft")
    assert choose_pair(None, None) == ("/demo/target-True", "/demo/draft")
    assert len(caplog.messages) == 1


def test_one_given(shipped: list[Path | None], caplog: pytest.LogCaptureFixture) -> None:
    shipped[0] = Path("/demo/draft")
    assert choose_pair(None, "none") == ("/demo/target-True", "none")
    assert choose_pair(None, "other") == ("/demo/target-True", "other")
    assert caplog.messages == []
    assert choose_pair("mine", None) == ("mine", "none")
    assert caplog.messages == ["no draft is given: decoding without a draft"]


def test_the_download_is_as_quiet_as_the_log(shipped: list[Path | None], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "dflash_jax"):
        assert choose_pair(None, "none")[0] == "/demo/target-False"
