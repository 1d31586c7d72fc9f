"""Prompts of the user's own: which lines give which prompts, and what is said of a bad one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_jax.errors import UserError
from dflash_jax.train.prompts import Messages, Prompt, read_prompts

USER, REPLY = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}


def encode(messages: Messages) -> list[int]:
    """A text's characters; a system turn is refused."""
    if messages[0]["role"] == "system":
        raise UserError("no system turn here")
    return [ord(c) for message in messages for c in message["content"]]


def written(folder: Path, *rows: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def test_each_kind_of_line(tmp_path):
    path = written(
        tmp_path, {"prompt": "x", "category": "code", "id": 7}, "", {"messages": [USER]}, {"prompt": "x"},
        {"conversation": [USER, REPLY, {"role": "user", "content": "d"}, REPLY]},
    )  # fmt: skip
    assert read_prompts(path, encode) == [Prompt(ids("x"), "code"), Prompt(ids("ab")), Prompt(ids("abcd"))]


def test_all_prompts_of_each_fiftieth_line_are_held_out(tmp_path):
    rows = [{"prompt": f"{i} "} for i in range(49)]
    talk = [USER, REPLY, {"role": "user", "content": "d"}, REPLY]
    found = read_prompts(written(tmp_path, *rows, {"messages": talk}, {"prompt": "last"}), encode)
    assert [p.tokens for p in found if p.held_out] == [ids("ab"), ids("abcd")]
    assert len(found) == 52


@pytest.mark.parametrize(("row", "message"), [
    ("plain text", "line 2 is not valid JSON: 'plain text'"),
    ("[1]", r"line 2 must be a JSON object, not '\[1\]'"),
    ({"text": "x"}, "line 2 must have one of the keys prompt, messages, conversation, and has text"),
    ({"prompt": "x", "messages": [USER]}, "line 2 must have one of the keys .* and has prompt, messages"),
    ({"prompt": " "}, "line 2: prompt must be a text that is not empty, not ' '"),
    ({"prompt": "x", "category": 3}, "line 2: category must be a text, not 3"),
    ({"messages": []}, r"line 2: messages must be a list of objects with role and content, not \[\]"),
    ({"messages": ["x"]}, r"line 2: messages must be a list of objects with role and content, not \['x'\]"),
    ({"messages": [REPLY]}, "line 2: messages has no turn of the user that the assistant answers"),
    ({"messages": [USER, {"role": "tool", "content": ""}]}, "line 2: messages must end with .* not of 'tool'"),
    ({"messages": [{"role": "system", "content": ""}, USER]}, "line 2: no system turn here"),
])  # fmt: skip
def test_a_bad_line_is_named(tmp_path, row, message):
    with pytest.raises(UserError, match=r"prompts\.jsonl " + message):
        read_prompts(written(tmp_path, {"prompt": "good"}, row), encode)


def test_files_without_prompts(tmp_path):
    with pytest.raises(UserError, match="holds no prompt"):
        read_prompts(written(tmp_path), encode)
    with pytest.raises(UserError, match="cannot read .*none.jsonl: No such file"):
        read_prompts(tmp_path / "none.jsonl", encode)
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(UserError, match="is not UTF-8"):
        read_prompts(tmp_path / "latin", encode)
