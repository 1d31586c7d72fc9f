"""The command line, and a tiny pair through the TPU's own compiler where libtpu is installed (684 MB: not in CI)."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from dflash_jax import UserError
from dflash_jax.aot import topology
from dflash_jax.aot.__main__ import main
from dflash_jax.aot.bench import Bench
from dflash_jax.aot.shapes import Pair, Work
from dflash_jax.aot.topology import chips, open_tpu
from dflash_jax.ops.dispatch import select

HAVE_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not HAVE_LIBTPU, reason="libtpu is not installed: pip install 'dflash-jax[aot]'")
ARGUMENTS = ["--tpu", "v6e:2x2", "--preset", "qwen3-8b"]


def mistake(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_without_libtpu_it_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    said = mistake(capsys, *ARGUMENTS)
    assert said == "error: the TPU's compiler, libtpu, is not installed: pip install 'dflash-jax[aot]'\n"


def test_every_chip_of_the_presets_is_known_by_its_name_and_its_topology():
    assert set(chips()) == {"v5e", "v5p", "v6e", "tpu7x"}
    for chip, preset in chips().items():
        kind = preset["aot_topology"].partition(":")[0]
        assert topology._chip(chip)[0] == topology._chip(f"{kind}:4x4")[0] == chip
    with pytest.raises(UserError, match=r"there is no TPU 'v99:2x2' \(for example .*v6e:2x2"):
        open_tpu("v99:2x2")


@needs_libtpu
@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--tpu", "v6e:2x2", "--preset", "qwen3-9b"], "there is no preset 'qwen3-9b'"),
     ([*ARGUMENTS, "--devices", "5"], "devices 5 is not between 1 and the 4 that v6e:2x2 has"),
     ([*ARGUMENTS, "--block-size", "17"], "block size 17 is not between 2 and the draft's 16"),
     (["--tpu", "v6e:3x77", "--preset", "qwen3-8b"], "libtpu knows no topology 'v6e:3x77'"),
     (["--tpu", "tpu7x:2x2x2", "--preset", "qwen3-8b"], "of size 8 cannot be split evenly over 16 devices")],
)  # fmt: skip
def test_mistakes_are_sentences(capsys, argv, message):
    assert message in mistake(capsys, *argv)


def tiny() -> Pair:
    """A pair of two layers each, at widths that a TPU takes."""
    pair = Pair.of("qwen3-8b")
    size = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 512}
    target = dataclasses.replace(pair.target, num_layers=3, **size)
    draft = dataclasses.replace(
        pair.draft, num_layers=2, windows=(None, 64), causal=(False, True), taps=(0, 2), mask_token_id=5, **size
    )
    return Pair(target, draft)


@pytest.fixture
def uncached() -> Iterator[None]:
    """What was compiled ahead of time can be kept, but not read again without the chip."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@needs_libtpu
@pytest.mark.slow
@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize(("chip", "devices"), [("v5e:2x2", 1), ("tpu7x:2x2x1", 4)])
def test_a_tiny_pair_compiles_with_kernels_in_and_pools_in_place(chip: str, devices: int, tmp_path: Path):
    tpu = open_tpu(chip, devices)
    work = Work(4, 200, 16, 64, 2, 16, jnp.dtype(jnp.bfloat16))
    bench = Bench("tiny", tiny(), work, tpu, select("auto", "tpu", tpu.mesh))
    decode, prefill = bench.run()
    once = {"prepare_block": 1, "accept_bonus": 1, **({"argmax_head": 1} if devices == 1 else {})}  # a mesh: XLA's head
    assert decode.kernels == {"paged_attention": 5, "paged_write": 5, **once}
    assert prefill.kernels == {"paged_attention": 3, "paged_write": 5}
    for step in (decode, prefill):
        assert step.fits and step.pools and step.traffic
        assert (step.pools.count, step.pools.aliased, step.pools.copies) == (5, 5, [])
        assert 0 < step.traffic.kernels < step.traffic.moved
        assert (step.traffic.between_chips > 0) == (devices > 1)
        assert json.loads(json.dumps(step.as_json()))["fits"]
    pages = -(-200 // 16)
    pages_bytes = 4 * pages * 16 * 5 * 2 * (4 // devices) * 128 * 2
    assert decode.traffic and pages_bytes < decode.traffic.kernels < 2.5 * pages_bytes


@needs_libtpu
@pytest.mark.slow
def test_what_is_too_large_for_a_device_is_told():
    """One layer of 20 GB on a chip of 16."""
    tpu, pair = open_tpu("v5e:2x2", 1), tiny()
    target = dataclasses.replace(pair.target, hidden_size=8192, intermediate_size=400_000, num_layers=1)
    draft = dataclasses.replace(pair.draft, hidden_size=8192, taps=(0,))
    work = Work(1, 64, 16, 16, 1, 16, jnp.dtype(jnp.bfloat16))
    decode = Bench("wide", Pair(target, draft), work, tpu, select("xla", "tpu")).run()[0]
    assert not decode.fits and decode.error and "hbm" in decode.error.lower()
    assert decode.memory.weights > 16 * 2**30 and "does not fit" in decode.text()
