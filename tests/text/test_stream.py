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


def test_a_stop_text_may_be_kept(tokenizer: Tokenizer) -> None:
    """What follows it in the same token is cut off all the same; nothing has to wait for it."""
    stream = TextStream(tokenizer, ["ba", "bab"], include_stop=True)
    shown = []
    for token in [0, 9, 1]:
        assert stream.add([token]) is None
        shown.append(stream.released)
    assert shown == ["a", "ac", "acb"]
    assert stream.add([4, 0]) == 1
    assert (stream.stopped, stream.text, stream.released) == (True, "acba", "acba")
    one_token = TextStream(tokenizer, ["ba"], include_stop=True)
    assert one_token.add([1, 1, 4, 3]) == 3
    assert one_token.text == "bba"


def test_of_two_stop_texts_the_first_in_the_text_is_kept(tokenizer: Tokenizer) -> None:
    """Then nothing after it is, though the other one ended earlier; of two that begin together, the shorter counts."""
    assert text_with_stops(tokenizer, ["aab", "a"], [9, 4]) == "ca"
    assert text_with_stops(tokenizer, ["ab", "aab"], [9, 4]) == "caab"


def text_with_stops(tokenizer: Tokenizer, stops: list[str], ids: list[int]) -> str:
    stream = TextStream(tokenizer, stops, include_stop=True)
    assert stream.add(ids) == len(ids)
    return stream.text


def test_stop_texts_that_the_first_tokens_complete_do_not_stop(tokenizer: Tokenizer) -> None:
    """Not later either; one that only begins among them does."""
    cases = ((1, 2, ""), (2, 5, "abb"), (4, 5, "abb"), (5, 7, "abbabaa"), (7, None, "abbabaaab"))
    for min_tokens, used, text in cases:
        stream = TextStream(tokenizer, ["ab"], min_tokens=min_tokens)
        assert stream.add([0, 1, 1, 0, 3, 0, 2]) == used, min_tokens
        assert stream.text == text, min_tokens


def test_a_short_stop_text_is_not_found_late_because_of_a_long_one(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["b", "cccccc"], min_tokens=2)
    assert stream.add([0, 1, 9, 0]) is None
    assert stream.add([1]) == 1
    assert stream.text == "abca"


@pytest.mark.parametrize("min_tokens, stopped", [(2, True), (3, False)])
def test_text_that_comes_with_the_end_counts_as_the_last_token_s(
    byte_fallback: Tokenizer, min_tokens: int, stopped: bool
) -> None:
    stream = TextStream(byte_fallback, ["é"], min_tokens=min_tokens)
    stream.add([1, 2, 3])
    stream.finish()
    assert (stream.stopped, stream.text) == (stopped, "a" if stopped else "aé")


@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=30),
    cuts=st.lists(st.integers(1, 5), max_size=30),
    stops=st.lists(st.text("abc😀", min_size=1, max_size=4), max_size=3),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 12),
)
def test_any_cut_gives_the_same(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], stops: list[str], include_stop: bool, min_tokens: int
) -> None:
    """However many tokens come at a time: same text, same token that ended it, and what was shown stays."""
    one_by_one, in_parts = (
        TextStream(tokenizer, stops, include_stop=include_stop, min_tokens=min_tokens) for _ in range(2)
    )
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
    text, stopped = defined(tokenizer, ids, stops, include_stop, min_tokens)
    assert (in_parts.text, in_parts.stopped) == (text, stopped)
    if not include_stop and not min_tokens:
        assert not any(stop in text for stop in stops)


def defined(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], include_stop: bool, min_tokens: int
) -> tuple[str, bool]:
    """Text, and whether a stop text ended it, from the definition: prefix by prefix, every occurrence looked at."""
    before = ""
    for count in range(1, len(ids) + 1):
        text = certain(tokenizer, ids[:count]) if count < len(ids) else tokenizer.decode(ids)
        ends = {(at, at + len(stop)) for stop in stops for at in range(len(text)) if text.startswith(stop, at)}
        new = sorted((at, end) for at, end in ends if end > len(before))
        if new and count > min_tokens:
            return text[: new[0][include_stop]], True
        before = text
    return before, False


def certain(tokenizer: Tokenizer, ids: list[int]) -> str:
    """What more tokens cannot change."""
    stream = TextStream(tokenizer)
    stream.add(ids)
    return stream.text
