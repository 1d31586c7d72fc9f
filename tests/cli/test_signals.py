"""Ctrl-C, a polite kill and a reader that has gone: what was shown stays, and there is no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llm.text_target import PAIR, PERIOD, START, known_prompt  # pyright: ignore[reportMissingImports]

from .conftest import KEYS, start

KNOWN = ",".join(map(str, known_prompt()))
ENDLESS = ["--ignore-eos", "--max-new-tokens", 240, "--max-running-requests", 1, "--draft", "none"]
# Rounds of a tiny model take no time: this makes them last, without a change to what they do.
SLOWLY = """
import itertools, os, runpy, sys, time
import dflash_jax.engine.runner as runner
decode, count = runner.DeviceRunner.decode, itertools.count()
stuck = int(os.environ.get("STUCK_AT", -1))
def slow_decode(*args, **options):
    time.sleep(60 if next(count) == stuck else 0.05)
    return decode(*args, **options)
runner.DeviceRunner.decode = slow_decode
sys.argv[0] = "generate"
runpy.run_module("dflash_jax.generate", run_name="__main__")
"""


def slowly(*argv: object, **options: Any) -> subprocess.Popen[str]:
    return start(*argv, python=("-c", SLOWLY), **options)


def read_until(process: subprocess.Popen[str], enough: Callable[[str], bool]) -> str:
    """stdout as it comes, character by character."""
    assert process.stdout
    text = ""
    while not enough(text):
        piece = process.stdout.read(1)
        assert piece, f"ended early: {text!r}, {process.stderr and process.stderr.read()}"
        text += piece
    return text


def end(process: subprocess.Popen[str], before: str = "") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err and "Error" not in err, err
    return process.returncode, before + out, err


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_the_text_so_far(target: Path, number: int, code: int) -> None:
    process = slowly("--target", target, "--prompt-ids", KNOWN, *ENDLESS)
    shown = read_until(process, lambda text: len(text) > 12)
    process.send_signal(number)
    returned, out, err = end(process, shown)
    assert returned == code
    whole = START + PERIOD * 27
    assert out.endswith("\n") and whole.startswith(out.rstrip("\n\ufffd"))
    assert len(shown) < len(out) < len(whole) / 2
    assert "mean acceptance 1.00" in err.splitlines()[-1]
    assert err.splitlines()[-1].endswith("1 of 1 prompts not finished)")


@pytest.mark.slow
def test_json_has_an_object_for_each_prompt_after_ctrl_c(target: Path) -> None:
    """One done, one in the middle, one that never began."""
    prompts = ["--prompt-ids", KNOWN, "--prompt-ids", "5,6", "--prompt-ids", "6,7", "--stop", "b你"]
    process = slowly("--target", target, *prompts, *ENDLESS, "--json")
    first = read_until(process, lambda text: text.endswith("\n"))
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    code, out, _ = end(process, first)
    assert code == 130
    done, middle, waiting = (json.loads(line) for line in out.splitlines())
    assert all(list(item) == KEYS for item in (done, middle, waiting))
    assert (done["finish_reason"], done["text"]) == ("stop", START[:-1])
    assert middle["finish_reason"] == "abort" and 1 <= len(middle["token_ids"]) < 200
    assert waiting["finish_reason"] == "abort"
    assert [waiting[key] for key in ("prompt", "token_ids", "text", "rounds", "time_to_first_token_s")] == [
        [6, 7], [], "", 0, None]  # fmt: skip


@pytest.mark.slow
def test_ctrl_c_before_anything_is_there() -> None:
    """While the model is being read: nothing to show, and nothing to explain."""
    code = "import signal, runpy, sys; import dflash_jax.llm as l; sys.argv[0] = 'generate'\n"
    code += "l.Engine = lambda *args: signal.raise_signal(signal.SIGINT)\n"
    code += "runpy.run_module('dflash_jax.generate', run_name='__main__')"
    process = start("--target", PAIR / "target", "--prompt-ids", "1", "--json", python=("-c", code))
    returned, out, err = end(process)
    assert (returned, out) == (130, "")
    assert err == "no draft is given: decoding without a draft\n"


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait(target: Path) -> None:
    """The first waits for the end of the round, which does not come."""
    process = slowly("--target", target, "--prompt-ids", KNOWN, *ENDLESS, env={"STUCK_AT": "11"})
    shown = read_until(process, lambda text: "b" in text)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    returned, _, _ = end(process, shown)
    assert returned == 130


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [True, False])
def test_a_reader_that_has_gone(target: Path, as_json: bool) -> None:
    """As with `| head -1`."""
    words = ["--prompt-ids", KNOWN, "--prompt-ids", "5,6", *["--json"] * as_json]
    with slowly("--target", target, *words, *ENDLESS, "--max-new-tokens", 30) as process:
        assert process.stdout and process.stderr
        read_until(process, lambda text: len(text) > 5)
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in err and "BrokenPipe" not in err


@pytest.mark.slow
def test_a_reader_of_both_streams_that_has_gone(target: Path) -> None:
    """As with `2>&1 | head -1`."""
    read_end, write_end = os.pipe()
    with slowly("--target", target, "--prompt-ids", KNOWN, *ENDLESS, stdout=write_end, stderr=write_end) as process:
        os.close(write_end)
        assert os.read(read_end, 7) == b"kernels"
        os.close(read_end)
    assert process.returncode == 128 + signal.SIGPIPE
