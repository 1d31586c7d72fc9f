"""Incremental decoding: the pieces are the whole, never half a character, as early as they are certain, and cheap."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders

from dflash_jax.text import IncrementalDetokenizer, Tokenizer
from dflash_jax.text import detokenize as subject
from dflash_jax.text.parts import TokenizerParts
from dflash_jax.text.tokenizer import clean_up_spaces

from . import tiny

ONE_TOKEN_DECODERS = {
    "sentencepiece": None,
    "metaspace": decoders.Metaspace(),
    "word pieces": decoders.WordPiece("##", cleanup=False),
    "word pieces, cleaned": decoders.WordPiece("##", cleanup=True),
    "suffix": decoders.BPEDecoder("</w>"),
    "two spaces off": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    "joined by spaces": None,
}


def made(name: str, clean_up: bool = False) -> Tokenizer:
    backend = tiny.sentencepiece_like() if name == "sentencepiece" else tiny.word_pieces(ONE_TOKEN_DECODERS[name])
    return Tokenizer(TokenizerParts(backend, name, clean_up=clean_up))


def pieces(tokenizer: Tokenizer, calls: Sequence[Sequence[int]], skip: bool = True) -> Iterator[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    for ids in calls:
        yield detokenizer.add(ids)
    yield detokenizer.finish()


def cut(ids: Sequence[int], generator: random.Random) -> list[list[int]]:
    """The ids in calls of 0 to 4 tokens, as rounds of speculative decoding deliver them."""
    calls, at = [], 0
    while at < len(ids):
        size = generator.choice((0, 1, 1, 2, 3, 4))
        calls.append(list(ids[at : at + size]))
        at += size
    return calls


@given(ids=st.lists(st.integers(0, 425), max_size=40), seed=st.integers(0, 99), skip=st.booleans())
def test_byte_level_pieces_are_the_whole(tokenizer: Tokenizer, ids: list[int], seed: int, skip: bool) -> None:
    """Ids of all kinds: raw bytes that never make a character, special tokens, ids past the vocabulary."""
    calls = cut(ids, random.Random(seed))
    assert "".join(pieces(tokenizer, calls, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("clean_up", [False, True])
@pytest.mark.parametrize("name", ONE_TOKEN_DECODERS)
@given(data=st.data(), seed=st.integers(0, 99), skip=st.booleans())
def test_other_decoders_pieces_are_the_whole(
    name: str, clean_up: bool, data: st.DataObject, seed: int, skip: bool
) -> None:
    tokenizer = made(name, clean_up)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=30))
    calls = cut(ids, random.Random(seed))
    assert "".join(pieces(tokenizer, calls, skip)) == tokenizer.decode(ids, skip)


def test_what_is_stripped_at_the_start_stays_inside() -> None:
    """A window that began with a lone space would lose the next one too."""
    tokenizer = made("two spaces off")
    assert list(pieces(tokenizer, [[12], [5], [12], [12], [5]])) == ["", "run", " ", " ", "run", ""]


@given(ids=st.lists(st.sampled_from([*range(3, 259), 259, 263]), max_size=25), seed=st.integers(0, 99))
def test_runs_of_byte_tokens(ids: list[int], seed: int) -> None:
    """One bad byte turns its whole run into replacement signs, whatever was valid before it."""
    tokenizer = made("sentencepiece")
    assert "".join(pieces(tokenizer, cut(ids, random.Random(seed)))) == tokenizer.decode(ids)


@given(text=st.text(alphabet=" .?!,'nmtsverx", max_size=40), seed=st.integers(0, 99))
def test_cleaning_up_a_stream(text: str, seed: int) -> None:
    stream = subject._CleanUp()
    out = [stream.add("".join(map(chr, part))) for part in cut([ord(char) for char in text], random.Random(seed))]
    assert "".join(out) + stream.finish() == clean_up_spaces(text)


def test_all_decoders_but_the_last_stream() -> None:
    kinds = {name: type(subject._stream_for(made(name).backend)).__name__ for name in ONE_TOKEN_DECODERS}
    assert set(kinds.values()) == {"_WindowStream"}


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]),
    ],
)
def test_decoders_that_rewrite_wait_for_the_end(decoder: decoders.Decoder) -> None:
    tokenizer = Tokenizer(TokenizerParts(tiny.word_pieces(decoder), "x"))
    ids = [2, 3, 5, 5, 12, 2]
    *early, last = pieces(tokenizer, [[i] for i in ids])
    assert set(early) == {""} and last == tokenizer.decode(ids) != ""


@pytest.mark.parametrize("text", ["🦊x👍🏽", "鳥語花香", "ōž 🍉🍇", "한국어"])
def test_no_half_characters(tokenizer: Tokenizer, text: str) -> None:
    """A character's bytes come in separate tokens and calls; it shows once, with its last byte (CASES 18)."""
    ids = tokenizer.encode(text)
    shown = list(pieces(tokenizer, [[i] for i in ids]))
    assert "".join(shown) == text and not any("\ufffd" in piece for piece in shown)
    assert shown[-1] == "", "the last byte completes the last character"
    assert shown[:-1].count("") >= 3, "characters must span tokens, or this tests nothing"


def test_a_character_that_is_cut_off_shows_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x🦊")[:-1]
    assert list(pieces(tokenizer, [ids])) == ["x", "\ufffd"]


def test_a_replacement_sign_of_the_text_itself(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x\ufffd")
    assert list(pieces(tokenizer, [ids])) == ["x\ufffd", ""]


@pytest.mark.parametrize("name", ["byte level", *ONE_TOKEN_DECODERS])
def test_text_shows_at_once(tokenizer: Tokenizer, name: str) -> None:
    """Ordinary tokens are never held back: after each, the text so far is that of the ids so far."""
    ids = tokenizer.encode("Why is the sky blue?")
    if name != "byte level":
        tokenizer, ids = made(name), [2, 4, 14, 5, 3] if name != "sentencepiece" else [259, 260, 261, 263, 262, 264]
    detokenizer, text = IncrementalDetokenizer(tokenizer), ""
    for count, token in enumerate(ids, start=1):
        text += detokenizer.add([token])
        assert text == tokenizer.decode(ids[:count])


def test_added_tokens_beyond_the_byte_alphabet() -> None:
    backend = tiny.trained()
    backend.add_tokens([AddedToken("你好", normalized=False), AddedToken("é ", normalized=False)])
    tokenizer = Tokenizer(TokenizerParts(backend, "x"))
    ids = [420, *tokenizer.encode("a"), 421, 420]
    assert "".join(pieces(tokenizer, [[i] for i in ids])) == tokenizer.decode(ids)


def test_special_tokens_show_when_asked_for(tokenizer: Tokenizer) -> None:
    ids = [1, *tokenizer.encode("hi"), 2]
    assert "".join(pieces(tokenizer, [ids])) == "hi"
    assert "".join(pieces(tokenizer, [ids], skip=False)) == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize("name", ["sentencepiece", "word pieces"])
def test_cost_per_token_does_not_grow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    plain = subject._WindowStream._decode

    def counting(stream: subject._WindowStream, ids: list[int]) -> str:
        decoded.append(len(ids))
        return plain(stream, ids)

    monkeypatch.setattr(subject._WindowStream, "_decode", counting)
    generator = random.Random(0)
    tokenizer = made(name)
    detokenizer = IncrementalDetokenizer(tokenizer)
    for _ in range(3000):
        detokenizer.add([generator.randrange(tokenizer.vocab_size)])
    assert sum(decoded) < 10 * 3000


def test_the_real_vocabulary(smollm2: Tokenizer) -> None:
    """Random ids of the demo target: mostly nonsense bytes, which is the point."""
    generator = random.Random(7)
    single_bytes = [i for i in range(smollm2.vocab_size) if len(smollm2.id_to_token(i) or "") == 1]
    for case in range(400):
        pool = single_bytes if case % 2 else range(smollm2.vocab_size)
        ids = [generator.choice(pool) for _ in range(generator.randrange(40))]
        skip = case % 3 > 0
        assert "".join(pieces(smollm2, cut(ids, generator), skip)) == smollm2.decode(ids, skip)


def test_decoder_descriptions_are_read(backend: tokenizers.Tokenizer) -> None:
    assert [step["type"] for step in subject._decoder_steps(backend)] == ["ByteLevel"]
    kinds = [step["type"] for step in subject._decoder_steps(tiny.sentencepiece_like())]
    assert kinds == ["Replace", "ByteFallback", "Fuse", "Strip"]
