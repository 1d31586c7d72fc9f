"""Masks against brute force, drafts and their rows, ends of text, what is refused, and 50 schemas walked at random."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken

from dflash_jax.engine import protocol
from dflash_jax.errors import UserError
from dflash_jax.structured import StructuredOutputs
from dflash_jax.text import Tokenizer, grammar
from dflash_jax.text.grammar import Grammar, GrammarCompiler
from dflash_jax.text.parts import TokenizerParts

from . import tiny

EOS = (2, 0)
SPARE = 37  # ids of the model that the tokenizer lacks; V is no multiple of 32
DATA = Path(__file__).parents[1] / "data"
SCHEMAS = [json.loads(line) for line in (DATA / "schemas.jsonl").read_text(encoding="utf-8").splitlines()]


def as_tokenizer(backend: tokenizers.Tokenizer, source: str = "here") -> Tokenizer:
    return Tokenizer(TokenizerParts(backend, source))


def letters() -> tokenizers.Tokenizer:
    """Every byte, and what is often side by side in words of a, b, 1, é and quotes."""
    backend = tiny.with_pre_tokenizer("gpt-2", tokenizers.Tokenizer(tokenizers.models.BPE()))
    backend.decoder = tokenizers.decoders.ByteLevel()
    corpus = ["".join(word) for n in (2, 3, 4) for word in itertools.product("abé1", repeat=n)] + ['"ab": "ba", ' * 9]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, special_tokens=list(tiny.SPECIALS), show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(corpus, trainer)
    return backend


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return as_tokenizer(letters())


@pytest.fixture(scope="module")
def compiler(small) -> GrammarCompiler:
    return GrammarCompiler(small, small.vocab_size + SPARE, EOS)


def byte_values() -> dict[str, int]:
    """What each character of a byte-level vocabulary stands for, as GPT-2 numbered them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    odd = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(odd)}


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Bytes of each id that is text."""
    values, added = byte_values(), tokenizer.backend.get_added_tokens_decoder()
    vocab = tokenizer.backend.get_vocab(with_added_tokens=False)
    return {i: bytes(values[char] for char in token) for token, i in vocab.items() if i not in added}


def ids_of(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def now(found: protocol.Grammar) -> set[int]:
    (row,) = found.masks([])
    return ids_of(row)


def words_of(pattern: str, alphabet: str, longest: int) -> set[bytes]:
    words = ("".join(word) for n in range(longest + 1) for word in itertools.product(alphabet, repeat=n))
    return {word.encode() for word in words if re.fullmatch(pattern, word)}


# -- masks -------------------------------------------------------------------------------------------------------------

CASES = [  # what is asked, its words by Python's `re`, their alphabet, the longest to think of, how far to walk
    (StructuredOutputs(regex="a+b"), "a+b", "ab", 12, 6),
    (StructuredOutputs(regex="(ab|ba1)*"), "(ab|ba1)*", "ab1", 9, 4),
    (StructuredOutputs(regex="[abé]{2,5}"), "[abé]{2,5}", "abé", 5, 10),
    (StructuredOutputs(regex="a?b?1?"), "a?b?1?", "ab1", 3, 3),
    (StructuredOutputs(regex="(aa|bb)+1{0,2}|é"), "(aa|bb)+1{0,2}|é", "ab1é", 8, 4),
    (StructuredOutputs(grammar='root ::= "a" ("b" | "é")*'), "a[bé]*", "abé", 8, 5),
]
CHOICES = ("ab", "abba", 'a"b\\', "é1", "", "€😀\n", "1\x07")


def check_walks(tokenizer: Tokenizer, found: Grammar, words: Iterable[bytes], longest: int, rng: random.Random) -> None:
    """Follow allowed tokens; at each step the mask is what the words say.

    Where the next byte is certain the library may allow fewer, but never none.
    """
    texts, words = token_bytes(tokenizer), set(words)
    prefixes = {word[:n] for word in words for n in range(len(word) + 1)}
    text = b""
    while len(text) <= longest:
        right = {i for i, more in texts.items() if text + more in prefixes}
        ends = set(EOS) if text in words else set()
        certain = len({texts[i][0] for i in right}) == 1 and not ends
        assert now(found) == right | ends or (certain and set() < now(found) < right), text
        if not right:
            return
        token = rng.choice(sorted(right))
        found.advance([token])
        text += texts[token]


@pytest.mark.parametrize(("asked", "pattern", "alphabet", "longest_word", "longest_walk"), CASES)
def test_masks_are_what_brute_force_says(compiler, small, asked, pattern, alphabet, longest_word, longest_walk):
    words, rng = words_of(pattern, alphabet, longest_word), random.Random(pattern)
    for _ in range(12):
        check_walks(small, compiler.compile(asked), words, longest_walk, rng)


def test_what_only_a_grammar_can_say(compiler, small):
    asked = StructuredOutputs(grammar='start: "a" inner "b"\ninner: start | "1" | ""')
    words = [b"a" * n + middle + b"b" * n for n in range(1, 12) for middle in (b"1", b"")]
    for seed in range(12):
        check_walks(small, compiler.compile(asked), words, 6, random.Random(seed))


def test_certain_text_is_cut_as_the_tokenizer_cuts_it(compiler, small):
    text = "abab1ab1éé1abab"
    found, ids = compiler.compile(StructuredOutputs(choice=[text])), small.encode(text)
    assert [ids_of(row) for row in found.masks(ids)] == [*({i} for i in ids), set(EOS)]


def test_choices_are_texts_of_any_kind(compiler, small):
    for seed in range(12):
        found = compiler.compile(StructuredOutputs(choice=CHOICES))
        check_walks(small, found, [text.encode() for text in CHOICES], 99, random.Random(seed))


def test_fixed_json_may_have_one_space_between_its_parts(compiler, small):
    parts = [b"[", b"1", b",", b'"a"', b"]"]
    words = {
        b"".join(part + b" " * gap for part, gap in zip(parts, (*gaps, 0), strict=True))
        for gaps in itertools.product((0, 1), repeat=4)
    }
    for seed in range(12):
        check_walks(
            small, compiler.compile(StructuredOutputs(json={"const": [1, "a"]})), words, 99, random.Random(seed)
        )


def test_a_schema_can_choose_its_white_space(compiler, small):
    schema = {"const": [1], "x-guidance": {"whitespace_pattern": "b"}}
    check_walks(small, compiler.compile(StructuredOutputs(json=schema)), [b"[1]", b"[b1]", b"[1b]", b"[b1b]"], 99,
                random.Random(0))  # fmt: skip


def test_any_json_object(compiler, small):
    found = compiler.compile(StructuredOutputs(json_object=True))
    assert now(found) == {i for i, text in token_bytes(small).items() if text in (b"{", b"{ ", b'{"', b"{}")}
    found.advance(small.encode('{"a": {"b": [1, null]}}'))
    assert now(found) == set(EOS)


# -- drafts ------------------------------------------------------------------------------------------------------------

ASKED = [asked for asked, *_ in CASES] + [
    StructuredOutputs(choice=CHOICES),
    StructuredOutputs(choice=["abab1ab1éé1abab"]),
    StructuredOutputs(json={"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2}),
]


def some_drafts(found: Grammar, rng: random.Random, vocab_size: int) -> list[int]:
    """Mostly allowed ones, then whatever comes."""
    drafts: list[int] = []
    for _ in range(rng.randrange(7)):
        allowed = sorted(ids_of(found.masks(drafts)[-1]))
        drafts.append(rng.choice(allowed) if rng.random() < 0.8 else rng.randrange(vocab_size))
    return drafts


def step(found: Grammar, rng: random.Random, vocab_size: int) -> None:
    """Rows of drafts are the masks of one that emitted them, and leave the state alone."""
    drafts, before, rows = some_drafts(found, rng, vocab_size), now(found), []
    rows = [ids_of(row) for row in found.masks(drafts)]
    assert len(rows) == len(drafts) + 1 and rows[0] == before == now(found)
    good = next((k for k, draft in enumerate(drafts) if draft not in rows[k]), len(drafts))
    assert all(row == set(range(vocab_size)) for row in rows[good + 1 :])
    for k in range(good):
        found.advance(drafts[k : k + 1])
        assert now(found) == rows[k + 1]
    if good < len(drafts):
        with pytest.raises(RuntimeError, match=f"token {drafts[good]} is not allowed"):
            found.advance(drafts[good : good + 1])
        assert now(found) == rows[good]


@pytest.mark.parametrize("seed", range(len(ASKED) * 5))
def test_rows_of_drafts_are_the_masks_after_them(compiler, small, seed):
    rng, vocab_size = random.Random(seed), small.vocab_size + SPARE
    found = compiler.compile(ASKED[seed % len(ASKED)])
    for _ in range(8):
        step(found, rng, vocab_size)


def test_masks_are_words_of_the_models_width(compiler, small):
    found = compiler.compile(StructuredOutputs(regex="a+"))
    rows = found.masks(np.array([small.token_to_id("b"), 5, 10**6]))
    assert found.width == -(-(small.vocab_size + SPARE) // 32)
    assert rows.dtype == np.uint32 and rows.shape == (4, found.width)
    for outside in (-1, small.vocab_size + SPARE, 10**6):
        assert ids_of(found.masks([outside])[1]) == set(range(small.vocab_size + SPARE))
        with pytest.raises(RuntimeError, match=f"after 0 tokens: token {outside} is not allowed"):
            found.advance([outside])


def test_no_id_is_below_zero(small):
    """-1 is not the last bit of the last word."""
    last = small.token_to_id("ab") | 31
    found = GrammarCompiler(small, last + 1, EOS).compile(StructuredOutputs(regex=r"[\s\S]*"))
    assert last in now(found)
    assert ids_of(found.masks([-1])[1]) == set(range(last + 1))


# -- ends --------------------------------------------------------------------------------------------------------------


def test_after_the_end_only_ends(compiler, small):
    a, ends = small.token_to_id("a"), set(EOS)
    found = compiler.compile(StructuredOutputs(choice=["a", "aa"]))
    rows = [ids_of(row) for row in found.masks([a, EOS[1], EOS[0], a, EOS[0]])]
    assert rows[1] >= ends | {a}
    assert rows[2] == rows[3] == ends
    assert rows[4] == rows[5] == set(range(small.vocab_size + SPARE))
    found.advance([a, EOS[1]])
    assert [ids_of(row) for row in found.masks([EOS[0]])] == [ends, ends]
    found.advance([EOS[0]])  # as a request that ignores them does
    with pytest.raises(RuntimeError, match=f"after 1 tokens: token {a} is not allowed"):
        found.advance([a])


def test_no_end_before_the_text_may_end(compiler, small):
    found = compiler.compile(StructuredOutputs(regex="ab"))
    with pytest.raises(RuntimeError, match="token 2 is not allowed"):
        found.advance([EOS[0]])
    found.advance(small.encode("ab"))
    found.advance([EOS[1]])


def test_an_end_that_is_also_text_is_only_an_end(small):
    a, b = small.token_to_id("a"), small.token_to_id("b")
    found = GrammarCompiler(small, small.vocab_size, [a]).compile(StructuredOutputs(regex="[ab]{2,3}"))
    assert a not in now(found) and b in now(found)
    assert [ids_of(row) for row in found.masks([b, b, a, a])][3:] == [{a}, {a}]
    assert ids_of(found.masks([b, a])[2]) == set(range(small.vocab_size))
    found.advance([b, b])
    assert a in now(found)
    found.advance([a])
    assert now(found) == {a}


# -- vocabularies ------------------------------------------------------------------------------------------------------


def test_added_tokens_are_no_text():
    backend = letters()
    backend.add_tokens([AddedToken("ab1ab", special=False), AddedToken("<a>", special=True)])
    tokenizer = as_tokenizer(backend)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, EOS)
    added = {tokenizer.token_to_id(text) for text in ("ab1ab", "<a>", *tiny.SPECIALS)}
    assert not now(compiler.compile(StructuredOutputs(regex="[ab1<>|_imstarend]{1,30}"))) & added
    found = compiler.compile(StructuredOutputs(grammar='start: "a" <a> "b"'))  # but where a grammar names one
    found.advance([tokenizer.token_to_id("a")])
    assert now(found) == {tokenizer.token_to_id("<a>")}


def test_ids_that_the_model_lacks_are_not_allowed(small):
    found = GrammarCompiler(small, 280, EOS).compile(StructuredOutputs(regex="[abé1]{1,9}"))
    texts = token_bytes(small)
    allowed = {i for i, text in texts.items() if re.fullmatch("[abé1]{1,9}", text.decode(errors="replace"))}
    assert max(allowed) >= 288  # of words that a mask of 280 ids does not have
    assert found.width == 9 and now(found) == {i for i in allowed if i < 280} | {
        i for i, text in texts.items() if text == "é".encode()[:1]
    }


def test_a_model_that_lacks_a_needed_byte(small):
    """It has no ids beyond "b", hence none for "é"; where drafts lead to such a place their row is empty."""
    b = small.token_to_id("b")
    compiler = GrammarCompiler(small, b + 1, EOS)
    with pytest.raises(UserError, match="'é' cannot be used: no token of the vocabulary may come now$"):
        compiler.compile(StructuredOutputs(regex="é"))
    found = compiler.compile(StructuredOutputs(regex="[ab](é|è)|[ab]b?1"))
    before = now(found)
    assert [len(ids_of(row)) for row in found.masks([b - 1, b, b])] == [2, 2, 1, b + 1]
    assert [len(ids_of(row)) for row in found.masks([b - 1, b, small.token_to_id("1")])][2:] == [1, 2]
    assert now(found) == before
    dead = compiler.compile(StructuredOutputs(regex="[ab](é|è)"))
    assert [ids_of(row) for row in dead.masks([b])] == [{b - 1, b}, set()]
    assert now(dead) == {b - 1, b}
    dead.advance([b])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="structured output after 1 tokens: .+"):
            dead.masks([])


def test_a_vocabulary_with_byte_tokens():
    """Llama 2's kind: "▁" is a space, and a byte token says the same as the letter."""
    tokenizer = as_tokenizer(tiny.sentencepiece_like())
    found = GrammarCompiler(tokenizer, tokenizer.vocab_size, [2]).compile(StructuredOutputs(regex="[a ]{2}"))
    assert now(found) == {tokenizer.token_to_id(text) for text in ("a", "<0x61>", "▁", "▁▁", "▁a", "<0x20>")}
    found.advance([tokenizer.token_to_id("<0x61>")])
    assert now(found) == {tokenizer.token_to_id(text) for text in ("a", "<0x61>", "▁", "<0x20>")}
    found.advance([tokenizer.token_to_id("▁")])
    assert now(found) == {2}


def test_the_demo_targets_tokens_have_the_bytes_that_the_library_thinks(smollm2):
    compiler = GrammarCompiler(smollm2, smollm2.vocab_size, smollm2.eos_token_ids)
    texts = token_bytes(smollm2)
    for pattern in ("[a-z]{1,6}", r" \w+", "[^\x00-\x7f]+"):
        whole = re.compile(pattern)
        right = {i for i, text in texts.items() if is_text(text) and whole.fullmatch(text.decode())}
        found = now(compiler.compile(StructuredOutputs(regex=pattern)))
        assert right and {i for i in found if is_text(texts[i]) and texts[i] != b" "} == right - {
            smollm2.token_to_id("Ġ")
        }


def is_text(data: bytes) -> bool:
    return "\ufffd" not in data.decode(errors="replace")


# -- compiling ---------------------------------------------------------------------------------------------------------


def test_requests_of_one_grammar_are_apart(compiler, small):
    asked = StructuredOutputs(choice=["ab1"])
    one, other = compiler.compile(asked), compiler.compile(StructuredOutputs(choice=("ab1",)))
    before = now(other)
    one.advance(small.encode("ab1"))
    assert now(other) == before == now(compiler.compile(asked)) != now(one)


def test_a_grammar_is_compiled_once_while_it_is_among_the_last(small, monkeypatch):
    compiler, compiled = GrammarCompiler(small, small.vocab_size, EOS), []
    make = compiler._matcher
    monkeypatch.setattr(compiler, "_matcher", lambda asked: (compiled.append(asked.value), make(asked))[1])
    monkeypatch.setattr(grammar, "KEPT", 2)
    for pattern in ("a", "b", "a", "1", "a", "b"):
        compiler.compile(StructuredOutputs(regex=pattern))
    assert compiled == ["a", "b", "1", "b"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"regex": "a(b"}, r"regex 'a\(b' cannot be used: unclosed group$"),
        ({"regex": "a(?=b)"}, "look-around, including look-ahead and look-behind, is not supported$"),
        ({"regex": r"[^\s\S]"}, "cannot be used: no token of the vocabulary may come now$"),
        ({"regex": "\ud800"}, "surrogates not allowed$"),
        ({"grammar": 'start: "a" foo'}, 'unknown name: "foo"$'),
        ({"grammar": 'start: : "a"'}, "Expected value"),
        ({"grammar": "root ::= ("}, "Failed to convert the grammar from GBNF to Lark"),
        ({"grammar": "{nothing"}, "grammar '{nothing' cannot be used: .+"),
        ({"json": {"type": "text"}}, "Invalid type: text$"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 4}}, r"minimum \(5\) is greater than maximum \(4\)$"),
        ({"json": {"type": "array", "uniqueItems": True}}, r'Unimplemented keys: \["uniqueItems"\]$'),
        ({"json": {"$ref": "#/$defs/x"}}, "'/[$]defs/x' does not exist$"),
        ({"json": {"type": "string", "pattern": "a(?=b)"}}, "is not supported$"),
    ],
)
def test_what_the_library_cannot_use_is_refused_with_its_reason(compiler, asked, message):
    with pytest.raises(UserError, match=message) as caught:
        compiler.compile(StructuredOutputs(**asked))
    assert str(caught.value).startswith(f"structured output: {next(iter(asked))} ") and "\n" not in str(caught.value)


def limited(compiler: GrammarCompiler, monkeypatch, **limits: int) -> None:
    """Make the library give up early."""
    make, few = compiler._library.LLMatcher, compiler._library.LLParserLimits(**limits)
    monkeypatch.setattr(compiler._library, "LLMatcher", Limited(make, few))


class Limited:
    def __init__(self, make: Any, limits: Any):
        self._make, self._limits = make, limits

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._make(*args, **options, limits=self._limits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make, name)


def test_too_complex_a_grammar_ends_in_one_sentence(small, monkeypatch, capfd):
    """The library gives up after some tokens.  Drafts that lead there do no harm, tokens do."""
    compiler = GrammarCompiler(small, small.vocab_size, EOS)
    limited(compiler, monkeypatch, max_items_in_row=6)
    found = compiler.compile(StructuredOutputs(grammar='start: e\ne: e e | "a" | "b" e | e "c"'))
    a, before = small.token_to_id("a"), now(found)
    rows = [ids_of(row) for row in found.masks([a] * 6)]
    bad = rows.index(set())
    assert 0 < bad < 6 and rows[0] == now(found) == before
    with pytest.raises(RuntimeError, match="tokens: Parser Error: Current row has .+") as caught:
        for _ in range(bad + 1):
            found.advance([a])
            found.masks([])
    with pytest.raises(RuntimeError, match="Current row has"):
        found.masks([])
    assert "\n" not in str(caught.value) and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("backend", [tiny.word_pieces(None), tiny.word_pieces(tokenizers.decoders.WordPiece())])
def test_a_tokenizer_that_the_library_cannot_read(backend):
    with pytest.raises(UserError, match="cannot be had with the tokenizer of words.json: can't determine decoder type"):
        GrammarCompiler(as_tokenizer(backend, "words.json"), 16, [1])


def test_targets_without_a_tokenizer_or_an_end(small):
    with pytest.raises(UserError, match="needs a tokenizer, and the target comes without one"):
        GrammarCompiler(None, 10, [1])
    for ends in ([], [10**6]):
        with pytest.raises(UserError, match="needs an end-of-text id, and here has none among the target's 400 ids"):
            GrammarCompiler(small, 400, ends)


def test_without_the_library_a_sentence_says_what_to_install(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"pip install 'dflash-jax\[structured\]'"):
        GrammarCompiler(small, 400, EOS)


def test_a_broken_library_is_not_taken_for_a_missing_one(small, monkeypatch, tmp_path):
    (tmp_path / "llguidance.py").write_text("import no_such_package\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llguidance", raising=False)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        GrammarCompiler(small, 400, EOS)


# -- what may be asked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, regex, grammar, choice, json_object, not none"),
        ({"regex": "a", "choice": ["a"]}, "not regex and choice"),
        ({"json": {}, "json_object": True}, "not json and json_object"),
        ({"json_object": 1}, "json_object must be true or false, not 1"),
        ({"json": "{"}, "json is not a JSON schema: Expecting"),
        ({"json": {"const": {1}}}, "json is not a JSON schema: Object of type set"),
        ({"json": {"const": float("nan")}}, "json is not a JSON schema"),
        ({"json": "[" * 10**5}, "json is not a JSON schema"),
        ({"json": "[1]"}, r"which is an object, not \[1\]"),
        ({"json": 3}, "which is an object, not 3"),
        ({"regex": ""}, "regex must be a text of at least one character, not ''"),
        ({"grammar": 5}, "grammar must be a text of at least one character, not 5"),
        ({"choice": "yes"}, "choice must be a list of texts, not 'yes'"),
        ({"choice": []}, r"choice must be a list of texts, not \[\]"),
        ({"choice": ["a", 1]}, "choice holds 1, which is not a text"),
    ],
)
def test_what_cannot_be_asked(fields, message):
    with pytest.raises(UserError, match=f"^structured output.*{message}"):
        StructuredOutputs(**fields)


def test_what_is_asked_does_not_change_and_has_a_hash():
    schema, choice = {"required": ["b", "a"]}, ["x"]
    asked = [StructuredOutputs(json=schema), StructuredOutputs(choice=choice)]
    schema["required"].clear()
    choice.clear()
    assert [(one.kind, one.value) for one in asked] == [("json", '{"required": ["b", "a"]}'), ("choice", ("x",))]
    assert StructuredOutputs(json='{"required":["b","a"]}') == asked[0]
    assert len({*asked, *asked}) == 2


# -- schemas -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["small", "smollm2"])
def walked(request) -> tuple[Tokenizer, GrammarCompiler]:
    """The demo target's tokenizer where it was fetched, and one that needs no fetching."""
    tokenizer = request.getfixturevalue(request.param)
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.vocab_size, EOS)


def random_walk(found: Grammar, rng: random.Random, limit: int) -> Sequence[int]:
    """Ids up to the end, chosen among the allowed ones."""
    out: list[int] = []
    while len(out) < limit:
        token = rng.choice(sorted(now(found)))
        found.advance([token])
        if token in EOS:
            return out
        out.append(token)
    raise AssertionError(f"no end within {limit} tokens: {out}")


@pytest.mark.parametrize("line", SCHEMAS, ids=[f"{n}" for n in range(len(SCHEMAS))])
def test_a_random_walk_ends_and_validates(walked, line):
    tokenizer, compiler = walked
    jsonschema.Draft202012Validator.check_schema(line["schema"])
    judge = jsonschema.Draft202012Validator(line["schema"], format_checker=jsonschema.FormatChecker())
    rng = random.Random(json.dumps(line))
    for _ in range(3):
        ids = random_walk(compiler.compile(StructuredOutputs(json=line["schema"])), rng, 400)
        judge.validate(json.loads(tokenizer.decode(ids)))


def test_fifty_schemas_with_prompts_of_one_line():
    assert len(SCHEMAS) == len({line["prompt"] for line in SCHEMAS}) == 50
    assert all(set(line) == {"prompt", "schema"} and "\n" not in line["prompt"] for line in SCHEMAS)
