"""The reference's process: what it is told, what is made of its answers, and how its end is told.

The process here is a script that speaks as the reference's does; no torch is needed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from dflash_jax.benchmark import reference_contender
from dflash_jax.benchmark.contender import Ask, ContenderError, Response
from dflash_jax.benchmark.encoding import Codec
from dflash_jax.benchmark.reference_contender import ReferenceContender, ReferenceOptions

SPEAKS = """
import json, sys
options = json.loads(sys.stdin.readline())
print(json.dumps({"device": "cpu", "block_size": 16, "dtype": "float32", "packages": {"dflash": "0"}}), flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    assert options["draft"] == "d" and ask["stop_ids"] == [2] and ask["block_size"] is None
    answer = {"token_ids": [4, 5, 6, 7], "accept_lengths": [2, 1], "ttft_s": 0.25, "e2e_s": 1.75}
    print(json.dumps({**answer, "peak_memory_bytes": 10**9}), flush=True)
"""
DIES = """
import sys
sys.stdin.readline()
raise ImportError("No module named 'dflash'")
"""
SLEEPS = "import time; time.sleep(60)"
ASK = Ask("a", [1, 2, 3], 4)


def answered(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str = sys.executable,
             timeout_s: float = 20.0) -> tuple[Response, dict[str, object]]:  # fmt: skip
    worker = tmp_path / "worker.py"
    worker.write_text(script)
    monkeypatch.setattr(reference_contender, "WORKER", worker)
    contender = ReferenceContender(
        "reference", ReferenceOptions("t", "d", python, timeout_s=timeout_s), Codec(), stop_ids=(2,)
    )

    async def talk() -> Response:
        try:
            await contender.open()
            return await contender.generate(ASK)
        finally:
            await contender.close()

    return asyncio.run(talk()), contender.facts()


def test_answers_become_responses(tmp_path, monkeypatch):
    found, facts = answered(SPEAKS, tmp_path, monkeypatch)
    assert found.token_ids == [4, 5, 6, 7] and found.output_tokens == 4 and found.prompt_tokens == 3
    assert found.ttft_s == pytest.approx(0.25) and found.e2e_s == pytest.approx(1.75)
    assert found.tpot_s == pytest.approx(0.5) and found.itl_s == []
    assert found.mean_accept_length == 1.5
    assert facts["block_size"] == 16 and facts["peak_memory_bytes"] == 10**9 and facts["dtype"] == "float32"


def test_its_last_words_are_told(tmp_path, monkeypatch):
    with pytest.raises(ContenderError, match="reference has ended: ImportError: No module named 'dflash'"):
        answered(DIES, tmp_path, monkeypatch)


def test_one_that_never_answers(tmp_path, monkeypatch):
    with pytest.raises(ContenderError, match="reference: no answer within 0.3 s"):
        answered(SLEEPS, tmp_path, monkeypatch, timeout_s=0.3)


def test_one_that_cannot_be_started(tmp_path, monkeypatch):
    with pytest.raises(ContenderError, match="cannot be started: No such file or directory"):
        answered(SPEAKS, tmp_path, monkeypatch, python=str(tmp_path / "no-python"))


def test_nothing_lies_beside_the_script_that_it_could_import_by_mistake():
    beside = [path.name for path in reference_contender.WORKER.parent.iterdir() if path.name != "__pycache__"]
    assert beside == ["worker.py"]
