"""The command line in this process (`cli`) and in one of its own (`Process`)."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
from llm.pairs import open_llm  # pyright: ignore[reportMissingImports]
from llm.text_target import PAIR, write_text_target  # pyright: ignore[reportMissingImports]

import dflash_jax.llm
from dflash_jax.generate import main

ROOT = Path(__file__).resolve().parents[2]
KEYS = [
    "prompt", "prompt_tokens", "token_ids", "text", "finish_reason", "rounds", "accept_lengths", "mean_accept_length",
    "time_to_first_token_s", "decode_s", "tokens_per_s", "target", "draft", "dtype", "platform",
]  # fmt: skip
EXTRAS = ("seed", "index", "logprobs", "prompt_logprobs")  # only where asked for


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        """stdout, every line of it, as JSON."""
        found = [json.loads(line) for line in self.out.splitlines()]
        assert all([key for key in item if key not in EXTRAS] == KEYS for item in found)
        return found

    @property
    def error(self) -> str:
        """The one line that says what the user did wrong; nothing on stdout, no traceback."""
        assert self.code == 2
        assert self.out == ""
        assert "Traceback" not in self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and self.err.endswith(lines[0] + "\n")
        return lines[0].removeprefix("error: ")


Cli = Callable[..., Result]


def reuse_models(target: str | None, draft: str | None, *, platform: str | None, progress: bool, **options: Any) -> Any:
    """`LLM`, opened once in a run for the same arguments."""
    assert target is not None and not progress, "there is no terminal"
    if platform is not None:
        options["platform"] = platform
    return open_llm(target, draft, **options)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli(*argv, stdin=b"")` runs `main` in this process; stdin=None: it is closed."""
    monkeypatch.setattr(dflash_jax.llm, "LLM", reuse_models)

    def run(*argv: object, stdin: bytes | None = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that speaks: see llm/text_target.py."""
    return write_text_target(tmp_path_factory.mktemp("text") / "target")


@pytest.fixture(scope="session")
def pair(target: Path) -> list[str]:
    """Arguments that name it and its draft."""
    return ["--target", str(target), "--draft", str(PAIR / "draft")]


LIGHT = {"XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_backend_optimization_level=0"}  # compiles in half the time


def start(
    *argv: object,
    python: tuple[str, ...] = ("-m", "dflash_jax.generate"),
    env: dict[str, str] | None = None,
    stdout: int | IO[Any] = subprocess.PIPE,
    stderr: int | IO[Any] = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """The command line in a process of its own, its output in pipes unless said otherwise.  `env` adds variables."""
    return subprocess.Popen(
        [sys.executable, *python, *map(str, argv)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **LIGHT, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        encoding="utf-8",
    )


def run_process(*argv: object, **options: Any) -> Result:
    process = start(*argv, **options)
    out, err = process.communicate(timeout=120)
    return Result(process.returncode, out or "", err or "")
