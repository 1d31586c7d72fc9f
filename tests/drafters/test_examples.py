"""The examples run, and say the truth."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from steps.lab import oracle_cases

from dflash_jax.drafters import drafter_names, registry
from drafters.cycles import light_compilation

FOLDER = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(request, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example of that name as a module; what it registers is gone afterwards."""
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    spec = importlib.util.spec_from_file_location(f"example_{request.param}", FOLDER / f"{request.param}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look there
    spec.loader.exec_module(module)
    yield module


def test_every_example_is_tested():
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == ["custom_drafter", "embed_steps"]


@pytest.mark.parametrize("example", ["custom_drafter"], indirect=True)
def test_custom_drafter(example: ModuleType, capsys):
    """The table holds what mostly follows, so most drafts are right; `main` itself compares the tokens."""
    assert "table" in drafter_names()
    assert example.learn_table([[1, 2, 1, 2, 1, 3]], 4) == [0, 2, 1, 3]
    with light_compilation():
        accepted = example.main(["--max-new-tokens", "40"])
    assert sum(accepted) == 39 and max(accepted) == 6 and sum(accepted) / len(accepted) > 2
    assert capsys.readouterr().out == f"40 tokens in {len(accepted)} rounds; accepted: {accepted}\n"


@pytest.mark.parametrize("example", ["embed_steps"], indirect=True)
def test_embed_steps(example: Any, capsys):
    """On two recorded cases, of 13 and 40 tokens: tokens and acceptance are the reference's, and a ban is kept."""
    cases = [case for case in oracle_cases(example.PAIR.name) if case["block_size"] == 4][1:4:2]
    ids = [",".join(map(str, case["prompt_ids"])) for case in cases]
    with light_compilation():
        fused, own = example.main(["--prompt-ids", ids[0], "--prompt-ids", ids[1], "--max-new-tokens", "30"])
    for case, output, accepted in zip(cases, fused.outputs, fused.accepted, strict=True):
        assert output == case["token_ids"][:30] and sum(accepted) == 29
        assert accepted[:-1] == case["accept_lengths"][: len(accepted) - 1]
    banned = int(capsys.readouterr().out.split("without token ")[1].split(":")[0])
    assert banned in fused.outputs[0]
    for free, bound in zip(fused.outputs, own.outputs, strict=True):
        assert banned not in bound and len(bound) == 30
        same = [*free, banned].index(banned)
        assert bound[:same] == free[:same]
