"""A user's mistake is one sentence and exit code 2, before anything is loaded."""

from __future__ import annotations

import json

import pytest
from llm.pairs import FOLDER  # pyright: ignore[reportMissingImports]

from dflash_jax.benchmark import options
from dflash_jax.benchmark.__main__ import main
from dflash_jax.errors import UserError

PAIR = ["--target", str(FOLDER / "qwen3-v1" / "target")]
DRAFT = ["--draft", str(FOLDER / "qwen3-v1" / "draft")]
SERVER = ["--no-engine", "--server", "http://127.0.0.1:9", "--quiet"]


def error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    [line] = captured.err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--concurrency", "0"], "--concurrency must be above 0, not 0"),
        (["--concurrency", "1,two"], "--concurrency must be numbers separated by commas, not '1,two'"),
        (["--request-rate", "inf"], "--request-rate must be above 0, not inf"),
        (["--concurrency", "1", "--request-rate", "2"], "--concurrency and --request-rate exclude each other"),
        (
            ["--preset", "smollm2-135m", "--synthetic-acceptance", "3", "--speculative-token-map", "x.json"],
            "--preset and --speculative-token-map exclude each other",
        ),
        (["--workload", "chat", "--input-len", "9"], "--workload and --input-len exclude each other"),
        (["--workload", "nonsense"], "workload 'nonsense' is none of chat, reasoning,"),
        (["--workload", "chat,,code"], "--workload has an empty name in 'chat,,code'"),
        (["--workload", "missing.jsonl"], "cannot read the workload missing.jsonl: No such file or directory"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1, not 0"),
        (["--alternate", "--reference"], "--alternate and --reference exclude each other: the reference must be gone"),
        (["--repeats", "0"], "--repeats must be at least 1, not 0"),
        (["--timeout", "0"], "--timeout must be above 0, not 0"),
        (["--synthetic-acceptance", "3"], "--preset and --synthetic-acceptance need each other"),
        (["--preset", "smollm2-135m"], "--preset and --synthetic-acceptance need each other"),
        (["--preset", "h200", "--synthetic-acceptance", "3"], "preset 'h200' is a machine, not a pair of models"),
        (["--preset", "none-such", "--synthetic-acceptance", "3"], "there is no preset 'none-such'"),
        (["--target", "/nowhere"], "/nowhere: no such file or folder"),
        (["--nonsense"], "unrecognized arguments: --nonsense (--help lists the options)"),
        (["--no-engine"], "--no-engine leaves nobody"),
        ([*PAIR, "--draft", "none", "--reference"], "--reference needs a DFlash draft: name one with --draft"),
        ([*PAIR, *DRAFT, "--reference"], "--reference needs the package 'dflash', which this Python has not"),
        ([*PAIR, *DRAFT, "--reference", "/no/python"], "--reference /no/python is no program"),
        ([*PAIR, *DRAFT, "--kernels", "xla,nonsense"], "kernels 'nonsense' is not one of auto, xla, pallas, triton"),
        ([*PAIR, "--draft", "no-such-draft"], "draft 'no-such-draft' is no drafter"),
        ([*SERVER, "--server", "localhost:8000"], "--server 'localhost:8000' is no URL"),
        ([*SERVER, "--server", "http://127.0.0.1:9"], "--server has the name 127.0.0.1:9 twice"),
    ],
)
def test_mistakes(capsys, tmp_path, words, told):
    assert error(capsys, *words, "--output", str(tmp_path / "out")).startswith(told)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be made" in error(capsys, *SERVER, "--output", str(tmp_path / "file" / "out"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot read"),
        ("{", "is not JSON"),
        ("[]", "holds no results of this benchmark"),
        (json.dumps({"schema": "other/1", "results": []}), "holds no results of this benchmark (schema 'other/1'"),
    ],
)
def test_files_that_cannot_be_compared(capsys, tmp_path, text, told):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    assert told in error(capsys, "compare", str(path), str(path))


def document(name: str, speed: float, **machine: object) -> dict[str, object]:
    level = {"level": "1", "output_throughput": speed, "mean_tpot_ms": None}
    return {"schema": "dflash_jax.benchmark/1", "machine": machine, "results": [{"name": name, "levels": [level]}],
            "target": "t", "workload": {"sha256": "1"}, "synthetic_acceptance": None}  # fmt: skip


def test_compare(capsys, tmp_path):
    for name, content in (("a", document("x", 10.0, cpu="old")), ("b", document("x", 25.0, cpu="new"))):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    out = capsys.readouterr().out
    assert "10 → 25" in out and "(×2.50)" in out and "note: cpu differs: old and new" in out


def test_compare_nothing_in_common(capsys, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(document(name, 10.0)))
    told = error(capsys, "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert told.endswith("have no contender and level in common")


def test_engines_that_are_open_together_on_an_accelerator_need_to_know_their_pools():
    words = ["--alternate", *PAIR]
    with pytest.raises(UserError, match="--alternate on gpu needs --kv-cache-bytes"):
        options.check_memory(options.parse(words), "gpu")
    options.check_memory(options.parse([*words, "--kv-cache-bytes", "1000000"]), "gpu")
    options.check_memory(options.parse(words), "cpu")
