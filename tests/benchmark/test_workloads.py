"""What is asked: built-in prompts, data sets, files, lengths."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from dflash_jax.benchmark.workloads import BUILT_IN, length_workload, named_workload, parse_row, read_set
from dflash_jax.errors import UserError

SAMPLES = {
    "gsm8k": {"question": "2+2?", "answer": "4"},
    "math500": {"problem": "2+2?", "solution": "4"},
    "humaneval": {"task_id": "x/0", "prompt": "def f():", "test": ""},
    "mbpp": {"prompt": "Write f.", "code": ""},
    "mt-bench": {"prompt": ["Hello.", "And now?"], "category": "writing"},
    "alpaca": {"instruction": "Add.", "input": "2 and 2", "output": "4"},
}
ASKED = {
    "gsm8k": "2+2?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "math500": "2+2?\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "humaneval": "Write a solution to the following problem and make sure that it passes the tests:\n"
                 "```python\ndef f():\n```",
    "mbpp": "Write f.",
    "mt-bench": "Hello.",
    "alpaca": "Add.\n\n2 and 2",
}  # fmt: skip


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_sets_are_large_and_varied(name):
    rows: Any = read_set(name)
    texts = [prompt[0]["content"] for _, prompt, _ in rows]
    assert len(texts) >= 40 and len(set(texts)) == len(texts)
    assert len({text[:25] for text in texts}) > 30
    assert all(text == text.strip() and len(text) < 1500 for text in texts)


def test_sets_are_mixed_evenly_and_shuffled_by_seed():
    workload = named_workload(BUILT_IN, 64, False, seed=3)
    assert len(workload.items) == 200 and len({item.key for item in workload.items}) == 200
    assert [item.key.partition("-")[0] for item in workload.items[:5]] == list(BUILT_IN)
    assert [item.number for item in workload.items[:3]] == [0, 1, 2]
    assert workload.sha256 == named_workload(BUILT_IN, 64, False, seed=3).sha256
    assert workload.sha256 != named_workload(BUILT_IN, 64, False, seed=4).sha256
    assert workload.sha256 != named_workload(BUILT_IN, 65, False, seed=3).sha256


def test_more_are_taken_than_there_are():
    workload = length_workload(5, 3, 2, seed=0)
    assert [item.key for item in workload.take(5)] == ["random-0", "random-1", "random-0", "random-1", "random-0"]


@pytest.mark.parametrize("vocab", [40, 151_936])
def test_lengths(vocab):
    items: Any = length_workload(100, 7, 3, seed=0, vocab_size=vocab).items
    assert all(len(item.prompt) == 100 and item.output_len == 7 and item.ignore_eos for item in items)
    assert all(0 <= token < vocab for item in items for token in item.prompt)
    assert items[0].prompt != items[1].prompt


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("form", ["jsonl", "json", "jsonl.gz"])
def test_data_sets_of_the_field(tmp_path, monkeypatch, name, form):
    monkeypatch.setenv("DFLASH_JAX_DATASETS", str(tmp_path))
    text = json.dumps([SAMPLES[name]] * 2) if form == "json" else f"{json.dumps(SAMPLES[name])}\n" * 2
    data = gzip.compress(text.encode()) if form.endswith("gz") else text.encode()
    (tmp_path / f"{name}.{form}").write_bytes(data)
    rows = read_set(name)
    assert [key for key, _, _ in rows] == [f"{name}-0", f"{name}-1"]
    assert rows[0][1] == [{"role": "user", "content": ASKED[name]}]
    assert rows[0][2] == (("And now?",) if name == "mt-bench" else ())


def test_a_row_of_another_form(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_JAX_DATASETS", str(tmp_path))
    (tmp_path / "gsm8k.jsonl").write_text('{"problem": "2+2?"}\n')
    with pytest.raises(UserError, match="data set gsm8k, row 0 has problem, which is not the set's form"):
        read_set("gsm8k")


@pytest.mark.parametrize(
    ("line", "prompt", "more"),
    [
        ('{"prompt": "hi"}', [{"role": "user", "content": "hi"}], ()),
        ('{"prompt": [1, 2]}', [1, 2], ()),
        ('{"turns": ["a", "b"], "id": 3}', [{"role": "user", "content": "a"}], ("b",)),
        ('{"messages": [{"role": "user", "content": "x"}]}', [{"role": "user", "content": "x"}], ()),
    ],
)
def test_lines_of_a_users_file(line, prompt, more):
    assert parse_row(line, "f line 1", "f-1") == ("f-1", prompt, more)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("hello", "f line 1 is not valid JSON: hello"),
        ('"hello"', "must be an object with one of the keys prompt, messages, turns"),
        ('{"text": "x"}', "must be an object with one of the keys"),
        ('{"prompt": "x", "turns": ["y"]}', "must be an object with one of the keys"),
        ('{"prompt": " "}', "prompt must be text or a list of token ids"),
        ('{"prompt": [true]}', "prompt must be text or a list of token ids"),
        ('{"turns": []}', "turns must be a list of texts"),
        ('{"messages": [{"role": "user"}]}', "messages must be a list of objects with role and content"),
    ],
)
def test_bad_lines(line, told):
    with pytest.raises(UserError, match=told):
        parse_row(line, "f line 1", "f-1")
