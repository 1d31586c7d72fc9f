"""Models that several files share; each is opened once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_jax import LLM

from .pairs import open_llm
from .text_target import PAIR, write_text_target


@pytest.fixture(scope="session")
def text_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_target(tmp_path_factory.mktemp("text") / "target")


@pytest.fixture(scope="session")
def text_llm(text_target: Path) -> LLM:
    """With the pair's draft, blocks of 12."""
    return open_llm(text_target, PAIR / "draft")


@pytest.fixture(scope="session")
def plain_llm(text_target: Path) -> LLM:
    """The same target without a draft."""
    return open_llm(text_target, "none")


@pytest.fixture(scope="session")
def two_slots(text_target: Path) -> LLM:
    """As `text_llm`, for many prompts: two at once and short chunks make few shapes to compile."""
    return open_llm(text_target, PAIR / "draft", max_running_requests=2, chunked_prefill_size=16)
