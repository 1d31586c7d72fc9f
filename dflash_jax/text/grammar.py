"""Which tokens may come next when a text must have a shape, by the library llguidance.

A grammar of bytes is matched against the bytes of each token, so it does not matter how a text is cut into tokens;
only where the grammar leaves one continuation, the library allows the tokens alone that the tokenizer would cut it
into.  Added tokens are never text: none may come but an end-of-text id, unless a Lark grammar names it.
White space between the parts of JSON is at most one space: small models otherwise write spaces and new lines without
end. A schema can choose for itself with the library's `"x-guidance": {"whitespace_pattern": …}`.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_jax.errors import GrammarError, UserError
from dflash_jax.structured import StructuredOutputs
from dflash_jax.text.tokenizer import Tokenizer

KEPT = 128  # compiled grammars of one compiler
JSON_OPTIONS = {"whitespace_pattern": "[ ]?"}
WORD_BITS = 32


class GrammarCompiler:
    """Makes grammars for one tokenizer and one model.  Building it takes about a second; it may be used by threads.

    vocab_size: V, the width of the model's logits, which may be more or fewer than the tokenizer's ids.
    eos_token_ids: all that end a text.  UserError without the library, a tokenizer that it can read, or such an id.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]):
        if tokenizer is None:
            raise UserError("structured output needs a tokenizer, and the target comes without one")
        eos = sorted({int(i) for i in eos_token_ids if 0 <= i < vocab_size})
        if not eos:
            raise UserError(
                f"structured output needs an end-of-text id, and {tokenizer.source} has none"
                f" among the target's {vocab_size} ids"
            )
        self._library = _library()
        self._tokenizer = _read_tokenizer(self._library, tokenizer, vocab_size, eos)
        self._bits = _Bits(vocab_size, self._tokenizer.vocab_size, eos)
        self._pristine: OrderedDict[tuple[str, object], Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, asked: StructuredOutputs) -> Grammar:
        """A grammar at its beginning; UserError with the library's reason where it cannot be used."""
        key = asked.kind, asked.value
        with self._lock:
            if key not in self._pristine:
                self._pristine[key] = self._matcher(asked)
            self._pristine.move_to_end(key)
            if len(self._pristine) > KEPT:
                self._pristine.popitem(last=False)
            return Grammar(self._pristine[key], self._bits)

    def _matcher(self, asked: StructuredOutputs) -> Any:
        """A matcher that can begin."""
        try:
            text = _grammar_text(self._library, asked)
            matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0)
        except ValueError as error:  # also for half a surrogate pair
            raise _unusable(asked, str(error)) from error
        if matcher.is_error():
            raise _unusable(asked, matcher.get_error())
        try:
            Grammar(matcher, self._bits).masks(())
        except GrammarError as error:
            raise _unusable(asked, str(error).split(": ", 1)[1]) from error
        return matcher


class Grammar:
    """Where one request stands in its grammar.  One thread at a time."""

    def __init__(self, beginning: Any, bits: _Bits):
        self._beginning = beginning
        self._matcher = beginning.deep_copy()
        self._bits = bits
        self._text: list[int] = []  # what was emitted
        self._ended = False  # by an end-of-text id; `ignore_eos` may ask for more of them

    @property
    def width(self) -> int:
        """Words of a mask: V / 32, rounded up."""
        return self._bits.width

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """uint32 [len(drafts) + 1, width]: row k allows what may come after drafts[:k]; bit i of word w is id 32w + i.

        Rows after a draft that is not allowed allow all V ids.  The state stays as it was.  GrammarError where nothing
        may come now, because the vocabulary lacks it or the grammar became too complex for the library; where that is
        so after some drafts, their row is empty.
        """
        rows = np.tile(self._bits.real, (len(drafts) + 1, 1))
        self._fill(rows[0], self._ended)
        if not rows[0].any():
            raise self._error("no token of the vocabulary may come now")
        ended, taken = self._ended, 0
        for k, draft in enumerate(map(int, drafts)):
            if not _holds(rows[k], draft):
                break
            ended = ended or draft in self._bits.eos_ids
            taken += 0 if ended else self._matcher.try_consume_tokens([draft])
            self._fill(rows[k + 1], ended)
        self._take_back(taken)
        return rows

    def advance(self, tokens: Sequence[int]) -> None:
        """Take what was emitted, perhaps with an end-of-text id at the end; GrammarError for what is not allowed."""
        for token in map(int, tokens):
            if not self._take(token):
                raise self._error(f"token {token} is not allowed")

    def _take(self, token: int) -> bool:
        if token in self._bits.eos_ids:
            self._ended = self._ended or self._matcher.is_accepting()
            return self._ended
        if self._ended or not 0 <= token < self._bits.vocab_size or not self._matcher.try_consume_tokens([token]):
            return False
        self._text.append(token)
        return True

    def _take_back(self, count: int) -> None:
        """Forget the last tokens.  After an error, which drafts may lead to, a matcher refuses all: then anew."""
        if not self._matcher.is_error() and self._matcher.rollback(count):
            return
        self._matcher = self._beginning.deep_copy()
        if self._matcher.try_consume_tokens(self._text) != len(self._text):
            raise self._error("the text so far was allowed and then refused")

    def _fill(self, row: np.ndarray, ended: bool) -> None:
        """The end-of-text ids are the text's end only, also where the vocabulary has them as ordinary text."""
        row[:] = 0 if ended else self._bits.of(self._matcher)
        if ended or self._matcher.is_accepting():  # never after an error
            row |= self._bits.eos

    def _error(self, problem: str) -> GrammarError:
        """With the library's own reason where that is more than a code word: after an error it refuses everything."""
        reason = _reason(self._matcher.get_error())
        return GrammarError(f"structured output after {len(self._text)} tokens: {reason if ' ' in reason else problem}")


class _Bits:
    """Sets of ids as rows of words.  real: ids below V; text: those that are no end-of-text ids."""

    def __init__(self, vocab_size: int, library_ids: int, eos_ids: Sequence[int]):
        self.vocab_size = vocab_size
        self.width = -(-vocab_size // WORD_BITS)
        self.eos_ids = frozenset(eos_ids)
        self.real = _row(range(vocab_size), self.width)
        self.eos = _row(eos_ids, self.width)
        self.text = self.real & ~self.eos
        self._fill = importlib.import_module("llguidance.numpy").fill_next_token_bitmask
        self._library_words = -(-library_ids // WORD_BITS)

    def of(self, matcher: Any) -> np.ndarray:
        """uint32 [width]: ids of text that the matcher allows now."""
        words = np.zeros((1, self._library_words), np.int32)
        self._fill(matcher, words)
        return words.view(np.uint32)[0, : self.width] & self.text


def _row(ids: Sequence[int], width: int) -> np.ndarray:
    flags = np.zeros(width * WORD_BITS, bool)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def _holds(row: np.ndarray, token: int) -> bool:
    word, bit = divmod(token, WORD_BITS)
    return 0 <= word < len(row) and bool(int(row[word]) >> bit & 1)


# -- the library -------------------------------------------------------------------------------------------------------


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ModuleNotFoundError as error:
        if error.name != "llguidance":
            raise
        raise UserError(
            "structured output needs the package llguidance: pip install 'dflash-jax[structured]'"
        ) from error


def _read_tokenizer(library: Any, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> Any:
    """The library's own tables over the tokenizer; ids that only the model has are never allowed."""
    fields = json.loads(tokenizer.backend.to_str())
    for added in fields["added_tokens"]:
        added["special"] = True  # so that the library never takes them for text
    ids = max(vocab_size, tokenizer.vocab_size)
    try:
        return library.LLTokenizer(json.dumps(fields), n_vocab=ids, eos_token=list(eos_ids), slices=_slices())
    except ValueError as error:
        raise UserError(
            f"structured output cannot be had with the tokenizer of {tokenizer.source}: {_reason(str(error))}"
        ) from error


def _slices() -> list[str]:
    """Texts whose tokens the library allows in one go where a grammar allows all such texts.

    Measured with SmolLM2's 49,152 ids against the library's own choice: about 20 µs a mask for 500 under the expression
    `[ -~]{1,200}`, and a tenth less for schemas with short strings.
    """
    ascii_text, text = r"[ !#-\[\]-~]", r"[^\"\\\x00-\x1F\x7F]"
    ascii_sizes = [f"{ascii_text}{{1,{size}}}" for size in (2, 4, 6, 8, 12, 16, 24, 32)]
    return [*ascii_sizes, f"{ascii_text}+", f"{text}{{1,4}}", f"{text}{{1,12}}", f"{text}+"]


def _grammar_text(library: Any, asked: StructuredOutputs) -> str:
    """What the library compiles."""
    kind, value = asked.kind, asked.value
    if kind == "json":
        return library.LLMatcher.grammar_from_json_schema(value, defaults=JSON_OPTIONS)
    if kind == "json_object":
        return library.LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=JSON_OPTIONS)
    if kind == "choice":
        return library.grammar_from("choice", json.dumps(value))
    if kind == "grammar" and value.lstrip().startswith("{"):
        return value
    return library.grammar_from(kind, value)


def _unusable(asked: StructuredOutputs, message: str) -> UserError:
    return UserError(f"structured output: {asked.kind} {asked.value!r:.60} cannot be used: {_reason(message)}")


def _reason(message: str) -> str:
    """The sentence in a report of the library, which may show the place in the text and its own state as well."""
    lines = [line.strip() for line in message.splitlines()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join(errors or lines[:1])[:300]
