"""A tokenizer from a Hugging Face model folder.

tokenizer.json is the tokenizer itself. Around it: tokenizer_config.json (special tokens, added
tokens, chat template), special_tokens_map.json (special tokens of older folders), chat templates in
files of their own, generation_config.json or config.json (stop tokens).
"""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from dflash_jax.config import read_json
from dflash_jax.errors import UserError
from dflash_jax.text.parts import TokenizerParts

_MAIN = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_LEGACY = "special_tokens_map.json"
_OTHER_FORMATS = ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "tekken.json", "tiktoken.model")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def has_tokenizer_files(folder: Path) -> bool:
    """Whether the folder holds a tokenizer in any format, readable here or not."""
    return any((folder / name).is_file() for name in (_MAIN, _CONFIG, *_OTHER_FORMATS))


def read_folder(folder: Path) -> TokenizerParts:
    """Read a folder; UserError names the file and what is wrong with it."""
    backend = _backend(folder)
    config = _config(folder)
    named = {name: _token(config[name], f"{folder}: {name}", True) for name in _NAMED if config.get(name) is not None}
    special = [*named.values(), *_unnamed_tokens(folder, config)]
    _add_missing_tokens(backend, _listed_tokens(folder, config), special)
    texts = {name: token.content for name, token in named.items()}
    return TokenizerParts(
        backend=backend,
        source=str(folder),
        special_tokens=texts,
        eos_token_ids=_stop_ids(folder, backend, texts),
        chat_templates=_templates(folder, config),
        frame=_frame(folder, backend, config, texts),
        clean_up=bool(config.get("clean_up_tokenization_spaces")) and _is_word_level(backend),
    )


def read_optional_json(path: Path) -> dict:
    """The JSON object in a file, empty when there is no such file; UserError when it is not one."""
    return read_json(path) if path.is_file() else {}


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _config(folder: Path) -> dict:
    """tokenizer_config.json; where it lists no added tokens the older special_tokens_map.json speaks over it."""
    config = read_optional_json(folder / _CONFIG)
    return config if "added_tokens_decoder" in config else config | read_optional_json(folder / _LEGACY)


def _backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / _MAIN
    if not path.is_file():
        others = [name for name in _OTHER_FORMATS if (folder / name).is_file()]
        hint = f"; it has {', '.join(others)}, which must be converted first" if others else ""
        raise UserError(f"{folder}: no {_MAIN}{hint}")
    text = read_text(path)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for whatever it cannot build
        read_json(path)  # says so when the file is not JSON in the first place
        raise UserError(f"{path}: not a usable tokenizer: {error}") from error


def _is_word_level(backend: tokenizers.Tokenizer) -> bool:
    """BPE decoders write spaces themselves, so cleaning up after them would damage the text."""
    return type(backend.model).__name__ != "BPE"


def _token(value: object, where: str, special: bool) -> AddedToken:
    """A token given as its text or as an object with `content` and flags."""
    if isinstance(value, str):
        return AddedToken(value, special=special)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {name: bool(value[name]) for name in _FLAGS if name in value}
        return AddedToken(value["content"], **{"special": special, **flags})
    raise UserError(f"{where} is {value!r:.80}, neither a string nor an object with content")


def _add_missing_tokens(backend: tokenizers.Tokenizer, listed: list[AddedToken], special: list[AddedToken]) -> None:
    """Added tokens that the config knows and tokenizer.json does not, or knows with other flags.

    New ones get the next free ids, in Hugging Face's order: listed, named, unnamed.
    """
    present = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in listed if repr(token) not in present])
    texts = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in special if token.content not in texts])


def _listed_tokens(folder: Path, config: dict) -> list[AddedToken]:
    """`added_tokens_decoder` in the order of its ids."""
    where = f"{folder / _CONFIG}: added_tokens_decoder"
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict) or not all(key.isdecimal() for key in decoder):
        raise UserError(f"{where} is not an object whose keys are token ids")
    return [_token(decoder[key], f"{where}[{key}]", special=False) for key in sorted(decoder, key=int)]


def _unnamed_tokens(folder: Path, config: dict) -> list[AddedToken]:
    """Special tokens without a role, under the old key and the new one."""
    tokens = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        values = config.get(key) or []
        values = list(values.values()) if isinstance(values, dict) else values
        if not isinstance(values, list):
            raise UserError(f"{folder}: {key} is {values!r:.80}, not a list of tokens")
        tokens += [_token(value, f"{folder}: {key}", special=True) for value in values]
    return tokens


def _stop_ids(folder: Path, backend: tokenizers.Tokenizer, texts: dict[str, str]) -> tuple[int, ...]:
    """The tokenizer's eos, then the ids of generation_config.json, or of config.json where that is missing."""
    own = backend.token_to_id(texts["eos_token"]) if "eos_token" in texts else None
    path = folder / "generation_config.json"
    path = path if path.is_file() else folder / "config.json"
    stated = read_optional_json(path).get("eos_token_id")
    stated = stated if isinstance(stated, list) else [stated]
    if not all(value is None or type(value) is int for value in stated):
        raise UserError(f"{path}: eos_token_id is {stated!r:.80}, not token ids")
    return tuple(dict.fromkeys(value for value in [own, *stated] if value is not None))


def _frame(
    folder: Path, backend: tokenizers.Tokenizer, config: dict, texts: dict[str, str]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Ids around a prompt where the config's add_bos_token or add_eos_token says so; None where it is silent."""
    flags = {edge: _flag(folder, config, f"add_{edge}_token") for edge in ("bos", "eos")}
    if all(flag is None for flag in flags.values()):
        return None
    before, after = _edges_of_post_processor(backend)
    return _edge(backend, flags["bos"], texts.get("bos_token"), before), _edge(
        backend, flags["eos"], texts.get("eos_token"), after
    )


def _edge(
    backend: tokenizers.Tokenizer, wanted: bool | None, token: str | None, present: tuple[int, ...]
) -> tuple[int, ...]:
    """One end of the frame: the token put in or taken out as wanted, whatever else is there kept."""
    token_id = None if token is None else backend.token_to_id(token)
    if wanted is None or token_id is None or wanted == (token_id in present):
        return present
    return (token_id, *present) if wanted else tuple(i for i in present if i != token_id)


def _edges_of_post_processor(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts around a text, found by trying it on one letter."""
    encoding = backend.encode("a")
    body = [index for index, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
    if not body:
        return tuple(encoding.ids), ()
    return tuple(encoding.ids[: body[0]]), tuple(encoding.ids[body[-1] + 1 :])


def _flag(folder: Path, config: dict, key: str) -> bool | None:
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise UserError(f"{folder / _CONFIG}: {key} is {value!r:.60}, not true or false")
    return value


def _templates(folder: Path, config: dict) -> dict[str, str]:
    """Chat templates by name; template files win over tokenizer_config.json, as in Hugging Face."""
    legacy = folder / "chat_template.json"
    found = _named_templates(read_optional_json(legacy).get("chat_template"), legacy)
    found |= _named_templates(config.get("chat_template"), folder / _CONFIG)
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    return found | {name: read_text(path) for name, path in files.items()}


def _named_templates(value: object, path: Path) -> dict[str, str]:
    """One template, or a list of {"name", "template"}, or an object from names to templates."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {item.get("name"): item.get("template") for item in value}
    if isinstance(value, dict) and all(isinstance(part, str) for pair in value.items() for part in pair):
        return value
    raise UserError(f"{path}: chat_template is neither a string nor a list of named templates")
