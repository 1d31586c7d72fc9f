"""Prompts of the user's own, one JSON object a line: a text, messages, or a conversation to be answered anew."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.errors import UserError

Messages = Sequence[Mapping[str, Any]]
Encode = Callable[[Messages], list[int]]
"""Chat messages → token ids of a prompt, with the chat template's header of the answer."""

HELD_OUT_EVERY = 50  # 2 % are held out
KEYS = ("prompt", "messages", "conversation")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Rendered and encoded; held_out: not to learn from, which all prompts of one line are, or none."""

    tokens: tuple[int, ...]
    category: str | None = None
    held_out: bool = False


def read_prompts(path: Path, encode: Encode) -> list[Prompt]:
    """The prompts of a JSONL file, in its order; of equal ones the first.  UserError names a bad line.

    A line has one of the keys `prompt` (text), `messages` and `conversation` (lists of {"role", "content"}), may have
    `category`, and other keys say nothing here.  Messages that end with the assistant are a ready conversation: each
    turn of the assistant is to be written again, after what stands before it in the file.
    """
    found: dict[tuple[int, ...], Prompt] = {}
    for number, (label, line) in enumerate(_lines(path)):
        row = _parsed(label, line)
        category = _category(label, row)
        for messages in _chats(label, row):
            tokens = _encoded(label, messages, encode)
            found.setdefault(tokens, Prompt(tokens, category, number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1))
    if not found:
        raise UserError(f"{path} holds no prompt")
    return list(found.values())


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """(what to call it, line) of those that are not blank."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{path} line {number}", line


def _parsed(label: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{label} is not valid JSON: {line.strip()[:60]!r}") from error
    if not isinstance(row, dict):
        raise UserError(f"{label} must be a JSON object, not {line.strip()[:60]!r}")
    return row


def _category(label: str, row: Mapping[str, Any]) -> str | None:
    category = row.get("category")
    if category is not None and (not isinstance(category, str) or not category):
        raise UserError(f"{label}: category must be a text, not {category!r:.60}")
    return category


def _chats(label: str, row: Mapping[str, Any]) -> list[Messages]:
    """What is to be answered: one or more lists of messages."""
    keys = [key for key in KEYS if key in row]
    if len(keys) != 1:
        raise UserError(f"{label} must have one of the keys {', '.join(KEYS)}, and has {', '.join(row)[:60] or 'none'}")
    key, value = keys[0], row[keys[0]]
    if key == "prompt":
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{label}: prompt must be a text that is not empty, not {value!r:.60}")
        return [[{"role": "user", "content": value}]]
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) and m.get("role") for m in value):
        raise UserError(f"{label}: {key} must be a list of objects with role and content, not {value!r:.60}")
    return _turns(label, key, value)


def _turns(label: str, key: str, messages: list[dict[str, Any]]) -> list[Messages]:
    """The messages before each of the assistant's turns, or all of them where the user has the last word."""
    roles = [message["role"] for message in messages]
    if roles[-1] == "user":
        return [messages]
    if roles[-1] != "assistant":
        raise UserError(f"{label}: {key} must end with a turn of user or assistant, not of {roles[-1]!r:.60}")
    asked = [i for i, role in enumerate(roles) if role == "assistant" and "user" in roles[:i]]
    if not asked:
        raise UserError(f"{label}: {key} has no turn of the user that the assistant answers")
    return [messages[:i] for i in asked]


def _encoded(label: str, messages: Messages, encode: Encode) -> tuple[int, ...]:
    try:
        return tuple(encode(messages))
    except UserError as error:
        raise UserError(f"{label}: {error}") from error
