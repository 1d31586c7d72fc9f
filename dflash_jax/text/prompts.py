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


def parse_ids(text: str, option: str = "--prompt-ids") -> list[int]:
    """Token ids separated by commas."""
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:  # Python's limit of 4300 digits included
        raise UserError(f"{option} must be integers separated by commas, not {shortened(repr(text))}") from None
    check_sizes(option, ids)
    return ids


def check_sizes(name: str, ids: list[int]) -> None:
    """UserError for a number that no vocabulary reaches: later messages repeat whole numbers."""
    for token in ids:
        if abs(token) >= 2**63:
            raise UserError(f"{name} holds {shortened(str(token))}, which is not a token id")


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
    if line[0] not in '{["':
        return line
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        if line[0] != "{":
            return line  # a line of plain text that begins with a quotation mark or a bracket
        raise UserError(f"{label} begins like a JSON object but is not valid JSON: {shortened(line)}") from error
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        key = "messages" if value and isinstance(value[0], dict) else "prompt"
        raise UserError(f'{label} is a JSON array: write {{"{key}": {shortened(json.dumps(value))}}}')
    keys = [key for key in ("prompt", "messages") if key in value]
    given = shortened(", ".join(value)) or "none"
    if len(keys) != 1:
        raise UserError(f"{label} must have one of the keys prompt and messages, and has {given}")
    if len(value) > 1:
        raise UserError(f"{label} may have the key prompt or the key messages and no other, and has {given}")
    return _checked(value[keys[0]], keys[0], label)


def _checked(value: Any, key: str, label: str) -> Any:
    """`prompt` is text or a list of ids; `messages` a list of objects (whose content the chat template checks)."""
    if key == "prompt" and isinstance(value, str):
        return value
    kind = int if key == "prompt" else dict
    if isinstance(value, list) and value and all(type(item) is kind for item in value):
        if kind is int:
            check_sizes(label, value)
        return value
    wanted = "text or a list of token ids" if key == "prompt" else "a list of message objects"
    raise UserError(f"{label}: {key} must be {wanted}, not {shortened(json.dumps(value))}")


def shortened(text: str, longest: int = 60) -> str:
    """The text with at most so many characters, for messages."""
    return text if len(text) <= longest else text[: longest - 1] + "…"
