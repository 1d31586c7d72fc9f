"""Prompts written by people: lists of token ids, and files with a prompt a line."""

from __future__ import annotations

import json
import sys
from typing import Any

from dflash_jax.errors import UserError

Named = tuple[str, Any]
"""What a prompt is called in messages, and the prompt: text, token ids or chat messages."""


def check_text(name: str, text: str) -> None:
    """UserError for a prompt of nothing but white space, or with half a surrogate pair."""
    if not text.strip():
        raise UserError(f"{name} is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X} at position {error.start}"
        raise UserError(f"{name} is not valid Unicode: it has half of a surrogate pair, {half}") from error


def parse_ids(text: str) -> list[int]:
    """Token ids separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--prompt-ids must be integers separated by commas, not {text!r}") from None


def read_prompts_file(name: str) -> list[Named]:
    """The file's lines ("-": stdin's) as prompts; blank ones are skipped.

    A line ends with a line feed and with nothing else: other separators may stand inside JSON strings.
    """
    where = "stdin" if name == "-" else name
    lines = [(f"{where} line {i}", line.strip()) for i, line in enumerate(_read(name).split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"--prompts-file {name} holds no prompt")
    return [(label, parse_line(line, label)) for label, line in lines]


def _read(name: str) -> str:
    if name == "-" and sys.stdin is None:
        raise UserError("cannot read --prompts-file -: stdin is closed")
    try:
        if name == "-":
            return sys.stdin.buffer.read().decode("utf-8-sig")
        with open(name, encoding="utf-8-sig", newline="") as file:
            return file.read()
    except OSError as error:
        shown = name or "''"
        raise UserError(f"cannot read --prompts-file {shown}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts-file {name} is not UTF-8 text: {error}") from error


def parse_line(line: str, label: str) -> Any:
    """Plain text, or the prompt of a JSON string or object.  UserError names the line by its `label`."""
    if line[0] not in '{"':
        return line
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        if line[0] == '"':
            return line  # a line of plain text that begins with a quotation mark
        raise UserError(f"{label} begins like a JSON object but is not valid JSON: {_shortened(line)}") from error
    if isinstance(value, str):
        return value
    keys = [key for key in ("prompt", "messages") if key in value]
    if len(keys) != 1:
        raise UserError(f"{label} must have one of the keys prompt and messages, and has {', '.join(value) or 'none'}")
    return _checked(value[keys[0]], keys[0], label)


def _checked(value: Any, key: str, label: str) -> Any:
    """`prompt` is text or a list of ids; `messages` a list of objects (whose content the chat template checks)."""
    if key == "prompt" and isinstance(value, str):
        return value
    kind = int if key == "prompt" else dict
    if isinstance(value, list) and value and all(type(item) is kind for item in value):
        return value
    wanted = "text or a list of token ids" if key == "prompt" else "a list of message objects"
    raise UserError(f"{label}: {key} must be {wanted}, not {_shortened(json.dumps(value))}")


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"
