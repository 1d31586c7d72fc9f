"""Text from token ids as they arrive, at a cost per token that does not grow with the text.

What `add` returns is certain: the pieces, with `finish` at the end, are exactly what decoding all ids
at once gives. Which text is certain depends on the decoder that the tokenizer declares:

- byte-level BPE: every token is a few bytes; a character is certain once its last byte is there;
- decoders that look at one token and whether it is the first (SentencePiece, WordPiece, ...): all text
  is certain, except that of raw byte tokens, which becomes certain with the next ordinary token;
- any other decoder may change earlier text later on: its text comes as a whole from `finish`.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Protocol

import tokenizers

from dflash_jax.text.tokenizer import CLEAN_UPS, Tokenizer, clean_up_spaces


class IncrementalDetokenizer:
    """Turns one request's tokens into text, call by call."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream = _stream_for(tokenizer.backend)
        self._clean_up = _CleanUp() if tokenizer.cleans_up else None

    def add(self, token_ids: Iterable[int]) -> str:
        """Take further tokens; return the text that is certain now and was not returned before."""
        text = self._stream.add([int(i) for i in token_ids if int(i) not in self._skipped])
        return text if self._clean_up is None else self._clean_up.add(text)

    def finish(self) -> str:
        """The rest of the text; bytes that never became a character show as U+FFFD. No tokens may follow."""
        text = self._stream.finish()
        return text if self._clean_up is None else self._clean_up.add(text) + self._clean_up.finish()


class _Stream(Protocol):
    def add(self, ids: list[int]) -> str: ...

    def finish(self) -> str: ...


def _stream_for(backend: tokenizers.Tokenizer) -> _Stream:
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteStream(backend)
    if _looks_at_one_token(steps):
        return _WindowStream(backend, byte_fallback="ByteFallback" in kinds)
    return _WholeStream(backend)


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict]:
    """The decoder's description as a flat list; empty when tokens are just joined by spaces."""
    if backend.decoder is None:
        return []
    return _flatten(json.loads(backend.decoder.__getstate__()))


def _flatten(step: dict) -> list[dict]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step["decoders"] for inner in _flatten(part)]


def _looks_at_one_token(steps: list[dict]) -> bool:
    """Whether later tokens leave the text of earlier ones alone (raw byte tokens apart)."""
    fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True  # from here on a step sees the text as a whole
        elif fused and not _is_safe_on_whole_text(step):
            return False
        elif kind not in ("ByteFallback", "Metaspace", "WordPiece", "BPEDecoder", "Replace", "Strip"):
            return False
    return True


def _is_safe_on_whole_text(step: dict) -> bool:
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "")) == 1
    return step["type"] == "Strip" and step["stop"] == 0


class _ByteStream:
    """Byte-level BPE: the tokens' bytes, decoded as UTF-8 as far as they make whole characters."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self._bytes_of: dict[int, bytes] = {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: list[int]) -> str:
        return self._utf8.decode(b"".join(map(self._token_bytes, ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _token_bytes(self, token_id: int) -> bytes:
        found = self._bytes_of.get(token_id)
        if found is None:
            found = self._bytes_of[token_id] = _spelt_bytes(self._backend.id_to_token(token_id) or "")
        return found


def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies spell a byte: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _spelt_bytes(token: str) -> bytes:
    """The bytes a token stands for; an added token with other characters stands for its own text."""
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:
        return token.encode("utf-8")


class _WindowStream:
    """Decodes only the last few tokens: what follows the part already returned is the new text.

    The window starts at tokens whose text is not empty, so that special treatment of a first token
    (no leading space) touches only text that was returned before.
    """

    def __init__(self, backend: tokenizers.Tokenizer, byte_fallback: bool):
        self._backend = backend
        self._byte_fallback = byte_fallback
        self._window: list[int] = []
        self._returned = 0  # ids of the window whose text was returned
        self._text = ""  # the text of those ids, decoded as a window of its own

    def add(self, ids: list[int]) -> str:
        self._window += [i for i in ids if self._backend.id_to_token(i) is not None]
        if len(self._window) == self._returned or self._ends_in_bytes():
            return ""
        text = self._decode(self._window)
        new = text[len(self._text) :]
        self._advance(text)
        return new

    def finish(self) -> str:
        return self._decode(self._window)[len(self._text) :]

    def _advance(self, text: str) -> None:
        latest = self._window[self._returned :]
        latest_text = self._decode(latest)
        if latest_text:
            self._window, text = latest, latest_text
        self._returned, self._text = len(self._window), text

    def _ends_in_bytes(self) -> bool:
        """A run of byte tokens is one piece of UTF-8: one bad byte at its end would change all of it."""
        last = self._backend.id_to_token(self._window[-1]) or ""
        return self._byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", last) is not None

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


class _WholeStream:
    """For decoders that may rewrite earlier text: nothing is certain before the end."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self._ids: list[int] = []

    def add(self, ids: list[int]) -> str:
        self._ids += ids
        return ""

    def finish(self) -> str:
        return self._backend.decode(self._ids, skip_special_tokens=False)


class _CleanUp:
    """`clean_up_spaces` on a stream: text is cut only where no pattern can reach across."""

    _OPEN = "".join(sorted({char for spaced, _ in CLEAN_UPS for char in spaced[:-1]}))

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> str:
        self._held += text
        cut = len(self._held.rstrip(self._OPEN))
        certain, self._held = self._held[:cut], self._held[cut:]
        return clean_up_spaces(certain)

    def finish(self) -> str:
        return clean_up_spaces(self._held)
