"""Standard streams that are closed, full or left by their reader: a sentence where one can be said, no traceback."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llm.text_target import PAIR  # pyright: ignore[reportMissingImports]

from dflash_jax.generate import main

from .conftest import ROOT, Cli

WORDS = ["--target", str(PAIR / "target"), "--draft", "none", "--prompt-ids", "1,2", "--max-new-tokens", "2"]
CLOSED = "stdout is closed, and the output has nowhere else to go"


class Failing:
    """A stream on which nothing can be written."""

    def __init__(self, error: OSError):
        self.error = error
        self.fd = os.open(os.devnull, os.O_WRONLY)

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error

    def fileno(self) -> int:
        return self.fd

    def isatty(self) -> bool:
        return False


def shell(redirection: str, *argv: str) -> tuple[int, str, str]:
    """The command line in a process of its own whose streams the shell redirects."""
    command = f'exec "$0" -m dflash_jax.generate "$@" {redirection}'
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", command, sys.executable, *argv], cwd=ROOT, env=env, capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    return done.returncode, done.stdout, done.stderr


# -- stdout ------------------------------------------------------------------------------------------------------------


def test_a_closed_stdout(cli: Cli, pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a model is opened."""
    monkeypatch.setattr(sys, "stdout", None)
    assert cli("--target", "/no/such/model", "hi").error == CLOSED


def test_a_stdout_that_the_shell_closed() -> None:
    assert shell(">&-", *WORDS) == (2, "", f"error: {CLOSED}\n")


def test_help_on_a_full_disk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", Failing(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert main(["--help"]) == 2
    assert capsys.readouterr().err == "error: cannot write to stdout: No space left on device\n"


def test_help_for_a_reader_that_has_gone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", Failing(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))))
    assert main(["--help"]) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


def test_a_reader_that_has_gone(cli: Cli, pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Failing(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))))
    result = cli(*pair, "--prompt-ids", "1,2", "--max-new-tokens", 2, "--json")
    assert result.code == 128 + signal.SIGPIPE
    assert "error" not in result.err and "Traceback" not in result.err


# -- stderr ------------------------------------------------------------------------------------------------------------

STDERRS: list[Any] = [None, Failing(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))]


@pytest.mark.parametrize("stderr", STDERRS, ids=["closed", "full"])
def test_a_stderr_that_takes_nothing(cli: Cli, pair: list[str], stderr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """stdout is as ever, and what cannot be said is not said there."""
    words = [*pair, "--prompt-ids", "1,2", "--max-new-tokens", 2, "--json"]
    expected = cli(*words).objects[0]["token_ids"]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        result = cli(*words)
        mistake = cli(*pair)
    assert (result.code, result.objects[0]["token_ids"]) == (0, expected)
    assert (mistake.code, mistake.out) == (2, "")


# -- stdin and files ---------------------------------------------------------------------------------------------------


def test_a_closed_stdin(cli: Cli, pair: list[str]) -> None:
    assert cli(*pair, "--prompts-file", "-", stdin=None).error == "cannot read --prompts-file -: stdin is closed"
    assert cli(*pair, "--prompt-ids", "1", "--max-new-tokens", 1, stdin=None).code == 0


def test_a_stdin_that_the_shell_closed() -> None:
    closed = shell("<&-", *WORDS, "--prompts-file", "-")
    assert closed == (2, "", "error: cannot read --prompts-file -: stdin is closed\n")
    for_writing = shell("0>/dev/null", *WORDS, "--prompts-file", "-")
    assert for_writing == (2, "", "error: cannot read --prompts-file -: Bad file descriptor\n")


def test_a_file_that_may_not_be_read(cli: Cli, pair: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("hi\n", encoding="utf-8")
    file.chmod(0)
    if os.access(file, os.R_OK):
        pytest.skip("this user may read everything")
    assert cli(*pair, "--prompts-file", file).error == f"cannot read --prompts-file {file}: Permission denied"


def test_a_file_that_fails_while_it_is_read(cli: Cli, pair: list[str]) -> None:
    if not Path("/proc/self/mem").exists():
        pytest.skip("no /proc")
    error = cli(*pair, "--prompts-file", "/proc/self/mem").error
    assert error == "cannot read --prompts-file /proc/self/mem: Input/output error"
    assert cli(*pair, "--prompts-file", "").error == "cannot read --prompts-file '': No such file or directory"
