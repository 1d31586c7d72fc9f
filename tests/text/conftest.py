"""Trained once for all tests of the folder: training takes a few milliseconds, loading less."""

from __future__ import annotations

import pytest
import tokenizers

from dflash_jax.places import cache_folder
from dflash_jax.text import Tokenizer

from . import tiny

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def backend() -> tokenizers.Tokenizer:
    """Byte-level BPE with the smollm family's cuts; tests that change it make their own."""
    return tiny.trained("smollm")


@pytest.fixture(scope="session")
def tokenizer(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(tiny.metadata(backend))


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    """The demo target's real tokenizer, where its file was fetched before."""
    cache = cache_folder()
    found = sorted(cache.rglob(SMOLLM2)) if cache.is_dir() else []
    if not found:
        pytest.skip(f"{SMOLLM2} is not below {cache}; the demo fetches it")
    return Tokenizer.from_gguf(found[0])
