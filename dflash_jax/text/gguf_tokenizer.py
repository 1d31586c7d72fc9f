"""A tokenizer from GGUF metadata (the `tokenizer.*` keys).

Only byte-level BPE (`tokenizer.ggml.model` "gpt2") is built. SentencePiece models ("llama") are
refused: their file holds scores instead of merges, and merges guessed from scores do not always
give the ids of the original.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken, decoders, models

from dflash_jax.errors import UserError
from dflash_jax.text.parts import TokenizerParts
from dflash_jax.text.pretokenizers import Family, family_named

T = TypeVar("T")

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_KEY = "tokenizer.ggml."
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # spelt so in the format
    "mask_token": "mask_token_id",
}
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class _Fields:
    """Typed access to the metadata; every complaint names the file and the key."""

    def __init__(self, fields: Mapping[str, object], source: str):
        self.fields = fields
        self.source = source

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value of an optional key, None when it is not there."""
        value = self.fields.get(_KEY + key)
        if value is None or type(value) is kind:  # not isinstance: a bool is no token id
            return value  # pyright: ignore[reportReturnType]
        raise self.error(key, f"is {value!r:.60}, not {kind.__name__}")

    def items(self, key: str, kind: type[T]) -> list[T]:
        """The array of a required key."""
        values = self.get(key, list)
        if values is None:
            raise self.error(key, "is missing")
        for index, value in enumerate(values):
            if type(value) is not kind:
                raise self.error(f"{key}[{index}]", f"is {value!r:.60}, not {kind.__name__}")
        return values

    def error(self, key: str, what: str) -> UserError:
        return UserError(f"{self.source}: {_KEY}{key} {what}")


def has_tokenizer(fields: Mapping[str, object]) -> bool:
    """Whether the file describes a tokenizer of any kind; models of raw ids say "none" or nothing."""
    return fields.get(_KEY + "model") not in (None, "none", "no_vocab")


def parts_from_metadata(fields: Mapping[str, object], source: str) -> TokenizerParts:
    """Build the tokenizer that GGUF key-value pairs describe; UserError names the key that is wrong."""
    meta = _Fields(fields, source)
    family = _family(meta)
    tokens = meta.items("tokens", str)
    types = _types(meta, tokens)
    special_ids = _named_ids(meta, tokens)
    backend = _backend(meta, family, tokens, types, set(special_ids.values()))
    stops = [_token_id(meta, key, tokens) for key in _STOP_KEYS]
    return TokenizerParts(
        backend=backend,
        source=source,
        special_tokens={name: tokens[token_id] for name, token_id in special_ids.items()},
        eos_token_ids=tuple(dict.fromkeys(stop for stop in stops if stop is not None)),
        chat_templates=_templates(fields, source),
        frame=_frame(meta, family, special_ids),
    )


def _family(meta: _Fields) -> Family:
    model = meta.get("model", str)
    if model != "gpt2":
        raise meta.error(
            "model", f"is {model!r}: only byte-level BPE ('gpt2') can be read from GGUF; use the model's folder instead"
        )
    name = meta.get("pre", str)
    if name is None:
        raise meta.error("pre", "is missing, so how the text is cut into words is unknown")
    return family_named(name, meta.source)


def _types(meta: _Fields, tokens: list[str]) -> list[int]:
    if meta.get("token_type", list) is None:
        return [_NORMAL] * len(tokens)
    types = meta.items("token_type", int)
    if len(types) != len(tokens):
        raise meta.error("token_type", f"has {len(types)} entries for {len(tokens)} tokens")
    return types


def _token_id(meta: _Fields, key: str, tokens: list[str]) -> int | None:
    token_id = meta.get(key, int)
    if token_id is not None and not 0 <= token_id < len(tokens):
        raise meta.error(key, f"is {token_id}, outside the {len(tokens)} tokens")
    return token_id


def _named_ids(meta: _Fields, tokens: list[str]) -> dict[str, int]:
    found = {name: _token_id(meta, key, tokens) for name, key in _NAMED_TOKENS.items()}
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def _backend(
    meta: _Fields, family: Family, tokens: list[str], types: list[int], named: set[int]
) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(_bpe(meta, family, tokens, types))
    backend.normalizer = family.normalizer()
    backend.pre_tokenizer = family.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    special = {_CONTROL, _UNKNOWN}
    added = [
        AddedToken(token, special=kind in special or index in named, normalized=False)
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in special or kind == _USER_DEFINED or index in named
    ]
    backend.add_tokens(added)
    return backend


def _bpe(meta: _Fields, family: Family, tokens: list[str], types: list[int]) -> models.BPE:
    """The merges over the vocabulary; padding entries (type unused) stay out, so that they decode to nothing."""
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if vocab.setdefault(token, index) != index:
            raise meta.error("tokens", f"has {token!r} twice, as ids {vocab[token]} and {index}")
    used = {token: index for token, index in vocab.items() if types[index] != _UNUSED}
    merges = [_merge(meta, index, pair) for index, pair in enumerate(meta.items("merges", str))]
    for index, (left, right) in enumerate(merges):
        if not {left, right, left + right} <= used.keys():
            raise meta.error(f"merges[{index}]", f"({left!r}, {right!r}) is not made of tokens of the vocabulary")
    return models.BPE(vocab=used, merges=merges, ignore_merges=family.ignore_merges)


def _merge(meta: _Fields, index: int, text: str) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if not left or not right or " " in right:
        raise meta.error(f"merges[{index}]", f"is {text!r}, not two tokens with a space between")
    return left, right


def _frame(meta: _Fields, family: Family, ids: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids around a prompt: bos as the file or else the family says, eos only when the file says so."""
    return _edge(meta, "bos", ids, family.add_bos), _edge(meta, "eos", ids, False)


def _edge(meta: _Fields, which: str, ids: Mapping[str, int], default: bool) -> tuple[int, ...]:
    stated = meta.get(f"add_{which}_token", bool)
    token_id = ids.get(f"{which}_token")
    if stated and token_id is None:
        raise meta.error(f"add_{which}_token", f"is true, but {_KEY}{which}_token_id is missing")
    wanted = default if stated is None else stated
    return (token_id,) if wanted and token_id is not None else ()


def _templates(fields: Mapping[str, object], source: str) -> dict[str, str]:
    """`tokenizer.chat_template` is the default; `tokenizer.chat_template.NAME` are further ones."""
    key = "tokenizer.chat_template"
    found: dict[str, str] = {}
    for name, value in fields.items():
        if name != key and not name.startswith(key + "."):
            continue
        if not isinstance(value, str):
            raise UserError(f"{source}: {name} is {value!r:.60}, not a string")
        found["default" if name == key else name[len(key) + 1 :]] = value
    return found
