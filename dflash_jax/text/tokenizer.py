"""Text to token ids and back, over the `tokenizers` library.

A `Tokenizer` comes from a Hugging Face folder (tokenizer.json and its companions) or from the
metadata of a GGUF file. Both give the ids of the model's original tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from dflash_jax.config.gguf_header import read_gguf_header
from dflash_jax.errors import UserError
from dflash_jax.text.gguf_tokenizer import has_tokenizer, parts_from_metadata
from dflash_jax.text.hf_folder import has_tokenizer_files, read_folder
from dflash_jax.text.parts import TokenizerParts


class Tokenizer:
    """Encodes and decodes; holds the stop tokens and the chat template."""

    def __init__(self, parts: TokenizerParts):
        self._parts = parts
        self.backend = parts.backend
        self.backend.no_truncation()
        self.backend.no_padding()

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """From a Hugging Face folder; UserError when a file is missing or wrong."""
        return cls(read_folder(Path(path)))

    @classmethod
    def from_gguf(cls, path: str | Path) -> Tokenizer:
        """From a GGUF file's metadata; UserError when its tokenizer is not byte-level BPE of a known family."""
        return cls.from_gguf_metadata(read_gguf_header(Path(path), arrays=True).pairs, source=str(path))

    @classmethod
    def from_gguf_metadata(cls, fields: Mapping[str, object], source: str = "GGUF metadata") -> Tokenizer:
        """From GGUF key-value pairs given as plain Python values."""
        return cls(parts_from_metadata(fields, source))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens spelt out in the text become their ids, as in Hugging Face.

        add_special_tokens: put bos/eos around the text where the model's tokenizer does.
        Raises UserError when the text holds half of a surrogate pair.
        """
        _check_unicode(text)
        frame = self._parts.frame
        if frame is None:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return [*frame[0], *ids, *frame[1]] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that form no character become U+FFFD, ids outside the vocabulary nothing."""
        text = self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)
        return clean_up_spaces(text) if self.cleans_up else text

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id, None when there is no such id."""
        return self.backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one, added tokens included."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of decoded text."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Template variables such as bos_token, each with the token's text."""
        return dict(self._parts.special_tokens)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._special_id("unk_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, the tokenizer's own eos first."""
        return self._parts.eos_token_ids

    @property
    def chat_template(self) -> str | None:
        """The default chat template, None when the model has none."""
        return self._parts.chat_templates.get("default")

    @property
    def chat_templates(self) -> dict[str, str]:
        """All chat templates by name."""
        return dict(self._parts.chat_templates)

    @property
    def cleans_up(self) -> bool:
        return self._parts.clean_up

    @property
    def source(self) -> str:
        """The file or folder it came from."""
        return self._parts.source

    def _special_id(self, name: str) -> int | None:
        token = self._parts.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer of a model folder or GGUF file; None where the model comes without one."""
    path = Path(path)
    if path.is_dir():
        return Tokenizer.from_folder(path) if has_tokenizer_files(path) else None
    if not path.is_file():
        raise UserError(f"{path}: no such model folder or GGUF file")
    fields = read_gguf_header(Path(path), arrays=True).pairs
    return Tokenizer.from_gguf_metadata(fields, source=str(path)) if has_tokenizer(fields) else None


CLEAN_UPS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def clean_up_spaces(text: str) -> str:
    """Undo the spaces that word-level tokenizers leave before English punctuation, as Hugging Face does."""
    for spaced, joined in CLEAN_UPS:
        text = text.replace(spaced, joined)
    return text


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        bad = f"U+{ord(text[error.start]):04X}"
        raise UserError(f"the text is not valid Unicode: lone surrogate {bad} at position {error.start}") from error
