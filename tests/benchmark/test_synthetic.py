"""Forced acceptance: its mean, that it is forced nowhere else, and that it is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from llm.pairs import FOLDER, compiling_lightly  # pyright: ignore[reportMissingImports]

from dflash_jax.benchmark import synthetic
from dflash_jax.benchmark.__main__ import main
from dflash_jax.benchmark.synthetic import ForcedAcceptance, acceptance_rate
from dflash_jax.errors import UserError
from dflash_jax.ops import Kernels, select

BLOCK = 8


@pytest.fixture
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A preset of the shape of a tiny pair."""
    pair = FOLDER / "qwen3-v1"
    shape = {name: json.loads((pair / name / "config.json").read_text()) for name in ("target", "draft")}
    for module in ("synthetic", "run"):
        monkeypatch.setattr(f"dflash_jax.benchmark.{module}.load_preset", lambda name: shape)
    with compiling_lightly():
        yield "tiny"


@pytest.mark.parametrize(("mean", "block"), [(1.0, 8), (2.5, 8), (6.5, 16), (16.0, 16)])
def test_the_rate_gives_the_mean(mean, block):
    rate = acceptance_rate(mean, block)
    assert sum(rate**k for k in range(block)) == pytest.approx(mean)


@pytest.mark.parametrize("mean", [0.9, 8.1])
def test_means_that_no_block_can_have(mean):
    with pytest.raises(UserError, match=r"is outside 1 … 8, the tokens of a block"):
        acceptance_rate(mean, 8)


def accepted(mean: float, requests: int = 4000) -> Any:
    """What the op gives for drafts that are all wrong."""
    forced = ForcedAcceptance("xla", rate=acceptance_rate(mean, BLOCK))
    tokens = np.arange(requests * BLOCK).reshape(requests, BLOCK) % 97
    ids = np.concatenate([tokens[:, :1], tokens[:, :-1] + 5], axis=1)
    lengths = np.arange(requests) * 7
    return forced.accept_bonus(
        jnp.asarray(ids, jnp.int32), jnp.asarray(tokens, jnp.int32), jnp.zeros((requests, BLOCK), bool),
        jnp.asarray(lengths, jnp.int32), jnp.full(requests, 10**6, jnp.int32), jnp.full((requests, 1), -1, jnp.int32),
        jnp.ones(requests, bool),
    ), tokens  # fmt: skip


@pytest.mark.parametrize("mean", [1.0, 3.0, 6.5, 8.0])
def test_the_op_commits_the_mean_and_the_targets_own_tokens(mean):
    found, tokens = accepted(mean)
    assert float(found.commit_len.mean()) == pytest.approx(mean, abs=0.12)
    kept = np.arange(BLOCK)[None] < np.asarray(found.commit_len)[:, None]
    np.testing.assert_array_equal(np.asarray(found.tokens), np.where(kept, tokens, 0))


def test_reach_falls_as_with_a_constant_rate():
    rate = acceptance_rate(4.0, BLOCK)
    lengths = np.asarray(accepted(4.0)[0].commit_len)
    reach = [(lengths > k).mean() for k in range(1, BLOCK)]
    np.testing.assert_allclose(reach, [rate**k for k in range(1, BLOCK)], atol=0.03)


def test_no_option_of_the_engine_leads_to_it():
    assert type(select("auto", "cpu")) is Kernels and type(select("xla", "cpu")) is Kernels
    with pytest.raises(UserError, match="kernels 'forced' is not one of"):
        select("forced", "cpu")
    assert ForcedAcceptance("xla", rate=0.0) != Kernels("xla"), "compiled steps would be shared"
    package = Path(synthetic.__file__).parents[1]
    users = [path for path in package.rglob("*.py") if "ForcedAcceptance" in path.read_text(encoding="utf-8")]
    assert users == [Path(synthetic.__file__)]


@pytest.mark.slow
def test_a_run_says_everywhere_that_it_is_synthetic(tiny_preset, tmp_path, capsys):
    words = ["--preset", tiny_preset, "--synthetic-acceptance", "3", "--input-len", "12", "--output-len", "60",
             "--concurrency", "2", "--num-prompts", "6", "--no-plain", "--no-split", "--max-model-len", "256",
             "--kv-cache-bytes", str(10**7),
             "--speculation", "always", "--dtype", "float32", "--quiet", "--output", str(tmp_path)]  # fmt: skip
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "SYNTHETIC: random weights, acceptance forced to 3" in out
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["synthetic_acceptance"] == 3 and document["target"] == "random weights of shape tiny"
    [drafted] = document["results"]
    assert drafted["name"] == "dflash_jax DFlash (synthetic 3)"
    assert drafted["facts"]["synthetic_acceptance"] == 3
    [level] = drafted["levels"]
    assert level["accept_length"] == pytest.approx(3, abs=0.5)
    assert level["total_output_tokens"] == 360 and level["exact_match"] is None
