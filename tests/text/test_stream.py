"""`TextStream` alone, without a model: what is shown when, and what a stop text takes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from dflash_jax.text import Tokenizer
from dflash_jax.text.parts import TokenizerParts
from dflash_jax.text.stream import TextStream

PIECES = ["a", "b", "ab", "ba", "aab", "ð", "Ł", "ĺ", "Ģ", "c", "<end>"]  # with the four bytes of an emoji
EMOJI = [5, 6, 7, 8]


def _tokenizer(backend: Backend) -> Tokenizer:
    return Tokenizer(TokenizerParts(backend, source="test"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = Backend(models.BPE({piece: token for token, piece in enumerate(PIECES)}, []))
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return _tokenizer(backend)


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As SentencePiece models: what ends with a byte token is not certain before `finish`."""
    pieces = ["<unk>", "a", "<0xC3>", "<0xA9>"]
    backend = Backend(models.BPE({piece: token for token, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # pyright: ignore
    return _tokenizer(backend)


def test_half_a_character_waits(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    shown = []
    for token in [0, *EMOJI, 1]:
        stream.add([token])
        shown.append(stream.released)
    assert shown == ["a", "a", "a", "a", "a😀", "a😀b"]


def test_what_may_become_a_stop_text_waits(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["abc"])
    shown = []
    for token in [0, 0, 1, 0, 1, 1, 0]:
        stream.add([token])
        shown.append(stream.released)
    assert shown == ["", "a", "a", "aab", "aab", "aababb", "aababb"]
    stream.finish()
    assert stream.released == stream.text == "aababba"


def test_a_stop_text_is_cut_off_wherever_it_began(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["bac", "ac"])
    assert stream.add([0, 4]) is None
    assert stream.add([0, 9, 1]) == 2
    assert (stream.stopped, stream.text, stream.released) == (True, "aaa", "aaa")
    stream.finish()
    assert stream.text == "aaa"


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["<end>"])
    assert stream.add([0, 10, 1]) is None
    assert stream.text == "ab"


@pytest.mark.parametrize("ids, text", [([1, 2, 3], "aé"), ([1, 2], "a\ufffd"), ([2, 1], "\ufffda")])
def test_finishing_twice_adds_nothing(byte_fallback: Tokenizer, ids: list[int], text: str) -> None:
    stream = TextStream(byte_fallback)
    stream.add(ids)
    for _ in range(3):
        stream.finish()
        assert stream.text == stream.released == text


def test_a_stop_text_may_come_with_the_end(byte_fallback: Tokenizer) -> None:
    stream = TextStream(byte_fallback, ["é"])
    assert stream.add([1, 2, 3]) is None
    stream.finish()
    assert (stream.stopped, stream.text) == (True, "a")


@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=30),
    cuts=st.lists(st.integers(1, 5), max_size=30),
    stops=st.lists(st.text("abc😀", min_size=1, max_size=4), max_size=3),
)
def test_any_cut_gives_the_same(tokenizer: Tokenizer, ids: list[int], cuts: list[int], stops: list[str]) -> None:
    """However many tokens come at a time: same text, same token that ended it, and what was shown stays."""
    one_by_one, in_parts = TextStream(tokenizer, stops), TextStream(tokenizer, stops)
    first_end = next((index for index, token in enumerate(ids) if one_by_one.add([token]) is not None), None)
    shown, at, end = "", 0, None
    for size in [*cuts, len(ids)]:
        used = in_parts.add(ids[at : at + size])
        assert in_parts.released.startswith(shown)
        shown = in_parts.released
        if used is not None:
            end = at + used - 1
            break
        at += size
    assert end == first_end
    one_by_one.finish()
    in_parts.finish()
    assert in_parts.text == one_by_one.text
    assert in_parts.text.startswith(shown)
    assert not any(stop in in_parts.text for stop in stops)
