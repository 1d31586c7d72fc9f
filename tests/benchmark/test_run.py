"""Whole runs with a tiny pair: what is written, and what becomes of it when somebody fails."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llm.pairs import compiling_lightly  # pyright: ignore[reportMissingImports]
from llm.text_target import PAIR, write_text_target  # pyright: ignore[reportMissingImports]

from dflash_jax.benchmark.__main__ import main

from .fake_server import Manner, serving
from .fakes import FakeContender


@pytest.fixture(autouse=True)
def light() -> Iterator[None]:
    with compiling_lightly():
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_target(tmp_path_factory.mktemp("benchmark") / "target")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("hi", "hi b", "b hi hi")))
    return path


def common(target: Path, folder: Path) -> list[str]:
    return ["--target", str(target), "--dtype", "float32", "--max-model-len", "128", "--output", str(folder),
            "--num-prompts", "3", "--output-len", "10", "--quiet"]  # fmt: skip


def read(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_plain_and_draft_in_one_run(target, prompts, tmp_path, capsys):
    words = ["--draft", str(PAIR / "draft"), "--workload", str(prompts), "--concurrency", "1,2", "--repeats", "2",
             "--speculation", "always"]  # fmt: skip
    assert main([*words, *common(target, tmp_path / "out")]) == 0
    document = read(tmp_path / "out")
    plain, drafted = document["results"]
    assert (plain["name"], drafted["name"]) == ("plain", "dflash_jax draft")
    for result in document["results"]:
        assert [level["level"] for level in result["levels"]] == ["1", "2"] and result["error"] is None
        for level in result["levels"]:
            assert level["exact_match"] == {"rate": 1.0, "compared": 6, "of": "tokens", "differences": []}
            assert level["completed"] == 3 and len(level["output_throughput_runs"]) == 2
            assert 0 < level["ceiling"]["tpot_ms"] and level["median_ttft_ms"] > 0
    assert plain["levels"][0]["speedup_over_plain"] == 1 and plain["levels"][0]["accept_length"] == 1
    assert drafted["levels"][0]["accept_length"] > 1
    assert 0 < drafted["levels"][0]["acceptance_rate_per_pos"][0] <= 1
    assert {"whole", "draft", "verify", "accept and commit"} == set(drafted["round_split_s"])
    assert plain["round_split_s"] is None
    assert drafted["facts"]["peak_memory_bytes"] > 0

    for key in ("command", "date", "revision", "version", "options", "rates"):
        assert key in document
    assert "--repeats 2" in document["command"] and str(tmp_path) not in json.dumps(document)
    assert document["options"]["seed"] == 0 and document["machine"]["packages"]["jax"]
    assert document["workload"]["name"] == "mine.jsonl" and len(document["workload"]["sha256"]) == 64
    for name in ("speedup", "acceptance", "round"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "100 %" in out and "ceiling" in out and "dflash_jax draft" in out

    path = str(tmp_path / "out" / "results.json")
    assert main(["compare", path, path]) == 0
    assert "(×1.00)" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["garbage", "hang", "refuses"])
def test_the_others_results_are_kept_when_a_server_fails(target, prompts, tmp_path, capsys, fault):
    words = ["--draft", "none", "--workload", str(prompts), "--concurrency", "1", "--no-charts", "--timeout", "0.5"]
    with socket.socket() as unused, serving(Manner(fault=fault)) as (bad, _), serving(Manner()) as (good, _):
        unused.bind(("127.0.0.1", 0))
        if fault == "refuses":
            bad = f"http://127.0.0.1:{unused.getsockname()[1]}"
        words += ["--server", f"bad={bad}", "--server", f"good={good}"]
        assert main([*words, *common(target, tmp_path / "out")]) == 1
    plain, failed, fine = read(tmp_path / "out")["results"]
    assert plain["error"] is None and len(plain["levels"]) == 1
    assert failed["error"].startswith(f"server bad ({bad}): ") and failed["levels"] == []
    assert fine["error"] is None and fine["levels"][0]["speedup_over_plain"] > 0
    assert fine["levels"][0]["exact_match"]["of"] == "text"
    captured = capsys.readouterr()
    assert "FAILED bad: server bad" in captured.out and "Traceback" not in captured.out + captured.err
    assert "server bad" in captured.err


@pytest.mark.slow
def test_tokens_that_differ_are_told_with_their_logit_gap(target, prompts, tmp_path, capsys, monkeypatch):
    """A contender whose third token is not plain decoding's."""
    from dflash_jax.benchmark import engine_contender

    take = engine_contender._take

    def wrong(response: Any, update: Any) -> None:
        take(response, update)
        if update.finish_reason is not None and response.token_ids and update.request.accept_lengths[0] > 1:
            response.token_ids[2] ^= 1

    monkeypatch.setattr(engine_contender, "_take", wrong)
    words = ["--draft", str(PAIR / "draft"), "--workload", str(prompts), "--concurrency", "1", "--no-charts",
             "--no-split", "--speculation", "always"]  # fmt: skip
    assert main([*words, *common(target, tmp_path / "out")]) == 0
    exact = read(tmp_path / "out")["results"][1]["levels"][0]["exact_match"]
    assert exact["rate"] < 1 and exact["compared"] == 3
    for one in exact["differences"]:
        assert one["position"] == 2 and one["plain"] ^ 1 == one["other"]
        assert one["logit_gap"] > 0, "greedy decoding prefers its own token"
    assert "leave plain decoding's" in capsys.readouterr().out


def test_servers_alone_need_no_target(tmp_path, capsys):
    with serving(Manner()) as (url, _):
        words = ["--no-engine", "--server", url, "--input-len", "9", "--output-len", "7", "--concurrency", "2",
                 "--output", str(tmp_path), "--no-charts", "--quiet"]  # fmt: skip
        assert main(words) == 0
    [result] = read(tmp_path)["results"]
    assert result["name"] == url.removeprefix("http://") and result["levels"][0]["accept_length"] == 3
    assert result["levels"][0]["ceiling"] is None, "nothing is known of its machine"


def test_nothing_is_written_when_nobody_could_be_measured(tmp_path, capsys):
    with serving(Manner(fault="status")) as (url, _):
        words = ["--no-engine", "--server", url, "--input-len", "9", "--output", str(tmp_path / "out"), "--quiet"]
        assert main(words) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("error: server ") and "answers 503" in err[-1]
    assert list((tmp_path / "out").iterdir()) == []


class Interrupted(FakeContender):
    async def generate(self, ask: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)


def test_ctrl_c_keeps_what_there_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dflash_jax.benchmark.run.contenders", lambda setting: [FakeContender("first"), Interrupted()])
    words = ["--no-engine", "--server", "http://127.0.0.1:9", "--input-len", "9", "--output", str(tmp_path), "--quiet"]
    assert main(words) == 130
    first, second = read(tmp_path)["results"]
    assert [level["level"] for level in first["levels"]] == ["1", "4"] and second["levels"] == []
    assert "first" in capsys.readouterr().out


def test_sigterm_keeps_what_there_is(tmp_path):
    """As `timeout` and batch systems send it."""
    with serving(Manner()) as (good, _), serving(Manner(fault="hang")) as (hangs, seen):
        words = ["--no-engine", "--server", f"good={good}", "--server", f"hangs={hangs}", "--input-len", "9",
                 "--output-len", "7", "--concurrency", "1", "--no-charts", "--output", str(tmp_path)]  # fmt: skip
        command = [sys.executable, "-m", "dflash_jax.benchmark", *words]
        run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        end_s = time.monotonic() + 60
        while not seen.bodies and time.monotonic() < end_s:
            time.sleep(0.05)
        run.terminate()
        _, said = run.communicate(timeout=60)
    assert run.returncode == 130 and "Traceback" not in said
    first, second = read(tmp_path)["results"]
    assert [level["level"] for level in first["levels"]] == ["1"] and second["levels"] == []
