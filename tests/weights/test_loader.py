"""Loading: the fused layouts against plain products, dtypes, shards, meshes, progress and memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from dflash_jax.errors import UserError
from dflash_jax.sharding import make_mesh
from dflash_jax.weights import load_draft, load_target, loader, open_draft, open_target

from .tiny import DRAFT, DRAFT2, LLAMA, QWEN3, Tensors, draft_tensors, target_tensors, write_folder

BIASED = {"attention_bias": True, "mlp_bias": True}


def load(folder: Path, dtype: Any = "float32", devices: Any = None) -> Any:
    return load_target(open_target(folder), dtype, make_mesh(devices))


def assert_trees_equal(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


def _project(tensors: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    return tensors[f"{name}.weight"] @ x + tensors.get(f"{name}.bias", np.float32(0))


@pytest.mark.parametrize("config", [{**LLAMA, **BIASED}, {**QWEN3, "attention_bias": True}, LLAMA, QWEN3])
def test_fused_parameters_compute_what_the_checkpoint_says(tmp_path: Path, config: dict[str, Any]):
    tensors = target_tensors(config, biases="attention_bias" in config)
    layer = load(write_folder(tmp_path, config, tensors))["layers"][1]
    layer = jax.tree.map(np.asarray, layer)
    kv, dim = config["num_key_value_heads"], config["head_dim"]
    group = config["num_attention_heads"] // kv
    rng, name = np.random.default_rng(3), "model.layers.1."
    x = rng.normal(size=config["hidden_size"]).astype(np.float32)

    fused = np.einsum("h,hgrd->grd", x, layer["attn"]["qkv"]) + layer["attn"].get("qkv_bias", np.float32(0))
    q, k, v = (_project(tensors, f"{name}self_attn.{part}_proj", x) for part in "qkv")
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(fused[:, :group], q.reshape(kv, group, dim), **close)
    np.testing.assert_allclose(fused[:, group], k.reshape(kv, dim), **close)
    np.testing.assert_allclose(fused[:, group + 1], v.reshape(kv, dim), **close)

    heads = rng.normal(size=(kv * group, dim)).astype(np.float32)
    out = np.einsum("nd,ndh->h", heads, layer["attn"]["o"]) + layer["attn"].get("o_bias", np.float32(0))
    np.testing.assert_allclose(out, _project(tensors, f"{name}self_attn.o_proj", heads.reshape(-1)), **close)

    both = np.einsum("h,hsf->sf", x, layer["mlp"]["gate_up"]) + layer["mlp"].get("gate_up_bias", np.float32(0))
    np.testing.assert_allclose(both[0], _project(tensors, f"{name}mlp.gate_proj", x), **close)
    np.testing.assert_allclose(both[1], _project(tensors, f"{name}mlp.up_proj", x), **close)
    inner = rng.normal(size=config["intermediate_size"]).astype(np.float32)
    down = inner @ layer["mlp"]["down"] + layer["mlp"].get("down_bias", np.float32(0))
    np.testing.assert_allclose(down, _project(tensors, f"{name}mlp.down_proj", inner), **close)
    assert ("gate_up_bias" in layer["mlp"]) == ("mlp_bias" in config)


def test_tensors_stored_as_they_are(tmp_path: Path):
    tensors = target_tensors(QWEN3)
    params = load(write_folder(tmp_path, QWEN3, tensors))
    for stored, found in {
        "model.embed_tokens": params["embed"],
        "lm_head": params["head"],
        "model.norm": params["norm"],
        "model.layers.1.input_layernorm": params["layers"][1]["input_norm"],
        "model.layers.1.post_attention_layernorm": params["layers"][1]["post_norm"],
        "model.layers.0.self_attn.q_norm": params["layers"][0]["attn"]["q_norm"],
        "model.layers.0.self_attn.k_norm": params["layers"][0]["attn"]["k_norm"],
    }.items():
        np.testing.assert_array_equal(found, tensors[f"{stored}.weight"])


@pytest.mark.parametrize("twice", [False, True], ids=["head left out", "head in the file too"])
def test_tied_targets_have_no_head(tmp_path: Path, twice: bool):
    config = {**LLAMA, "tie_word_embeddings": True}
    tensors = target_tensors(LLAMA if twice else config)
    assert ("lm_head.weight" in tensors) == twice
    assert "head" not in load(write_folder(tmp_path, config, tensors))


def test_old_buffers_are_passed_over(tmp_path: Path):
    tensors = target_tensors(LLAMA) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    load(write_folder(tmp_path, LLAMA, tensors))


def test_parts_do_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_folder(tmp_path, {**LLAMA, **BIASED}, target_tensors(LLAMA, biases=True))
    whole = load(folder)
    for size in (1, 100, 1000):
        monkeypatch.setattr(loader, "BLOCK_ELEMENTS", size)
        assert_trees_equal(load(folder), whole)


def test_several_files_equal_one(tmp_path: Path):
    tensors = target_tensors(QWEN3)
    one = load(write_folder(tmp_path / "one", QWEN3, tensors))
    assert_trees_equal(load(write_folder(tmp_path / "three", QWEN3, tensors, shards=3)), one)


def test_a_single_file_of_another_name(tmp_path: Path):
    folder = write_folder(tmp_path, QWEN3, target_tensors(QWEN3))
    one = load(folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert_trees_equal(load(folder), one)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("wanted", [np.float32, ml_dtypes.bfloat16])
def test_every_float_dtype_is_read_and_rounded_once(tmp_path: Path, stored: Any, wanted: Any):
    tensors = {name: value.astype(stored) for name, value in target_tensors(LLAMA).items()}
    params = load(write_folder(tmp_path, LLAMA, tensors), wanted)
    assert all(leaf.dtype == wanted for leaf in jax.tree.leaves(params))
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"].astype(wanted))
    np.testing.assert_array_equal(
        params["layers"][0]["mlp"]["down"], tensors["model.layers.0.mlp.down_proj.weight"].astype(wanted).T
    )


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_two_devices_hold_the_same_values(tmp_path: Path):
    folder = write_folder(tmp_path, QWEN3, target_tensors(QWEN3))
    split = load(folder, devices=jax.devices()[:2])
    assert_trees_equal(split, load(folder))
    shards = split["layers"][0]["attn"]["qkv"].addressable_shards
    assert [shard.data.shape for shard in shards] == [(32, 1, 5, 16)] * 2
    odd = {**QWEN3, "vocab_size": 51}
    whole = load(write_folder(tmp_path / "odd", odd, target_tensors(odd)), devices=jax.devices()[:2])
    assert [shard.data.shape for shard in whole["embed"].addressable_shards] == [(51, 32)] * 2
    odd = {**QWEN3, "intermediate_size": 51}
    with pytest.raises(UserError, match="ffn of size 51 cannot be split evenly over 2 devices"):
        load(write_folder(tmp_path / "ffn", odd, target_tensors(odd)), devices=jax.devices()[:2])


def test_progress_goes_to_a_terminal_s_stderr_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    checkpoint = open_target(write_folder(tmp_path, LLAMA, target_tensors(LLAMA)))
    load_target(checkpoint, "float32", make_mesh())
    load_target(checkpoint, "float32", make_mesh(), progress=True)
    assert capsys.readouterr() == ("", ""), "a file or a pipe is not flooded with a bar"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load_target(checkpoint, "float32", make_mesh())
    assert capsys.readouterr() == ("", "")
    load_target(checkpoint, "float32", make_mesh(), progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "loading: 100%" in err


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_draft_parameters(tmp_path: Path, suffix: str):
    tensors = draft_tensors(DRAFT2)
    for name in [name for name in tensors if name.endswith(("_codebook", "base_kernel"))]:
        tensors[name + suffix] = tensors.pop(name)
    params = _load_draft(tmp_path, DRAFT2, tensors)
    width, taps, groups = 32, 3, 4
    x = np.random.default_rng(4).normal(size=width).astype(np.float32)
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    for path, name in (("attn_conv", "layers.1.attention_conv"), ("mlp_conv", "layers.1.mlp_conv")):
        conv = params["layers"][1][path]
        np.testing.assert_array_equal(conv["base"], tensors[f"{name}.base_kernel{suffix}"])
        delta = tensors[f"{name}.kernel_projection.weight"] @ x
        np.testing.assert_allclose(np.einsum("h,hstg->stg", x, conv["kernel"]), delta.reshape(2, taps, groups), **close)
    selector = params["selector"]
    for side in ("predecessor", "successor"):
        np.testing.assert_array_equal(selector[side], tensors[f"candidate_selector.{side}_codebook{suffix}"])
    projected = tensors["candidate_selector.hidden_projection.weight"] @ x
    np.testing.assert_allclose(x @ np.asarray(selector["hidden"]), projected, **close)
    both = np.concatenate([x, 2 * x])
    np.testing.assert_allclose(both @ np.asarray(params["fc"]), tensors["fc.weight"] @ both, rtol=1e-5, atol=1e-4)


def _load_draft(folder: Path, config: dict[str, Any], tensors: Tensors) -> Any:
    target = open_target(write_folder(folder / "target", QWEN3, target_tensors(QWEN3))).config
    return load_draft(open_draft(write_folder(folder / "draft", config, tensors), target), "float32", make_mesh())


def test_draft_has_the_joined_projections(tmp_path: Path):
    tensors = draft_tensors(DRAFT)
    inject = _load_draft(tmp_path, DRAFT, tensors)["inject"]
    keys = tensors["layers.1.self_attn.k_proj.weight"].reshape(2, 8, 32)
    values = tensors["layers.1.self_attn.v_proj.weight"].reshape(2, 8, 32)
    np.testing.assert_array_equal(inject["weight"][:, 1, 0], keys.transpose(2, 0, 1))
    np.testing.assert_array_equal(inject["weight"][:, 1, 1], values.transpose(2, 0, 1))
    np.testing.assert_array_equal(inject["k_norm"][0], tensors["layers.0.self_attn.k_norm.weight"])


MEASURE = r"""
import re, sys
import jax, numpy as np
from dflash_jax.sharding import make_mesh
from dflash_jax.weights import load_target, open_target
def peak_mb():  # getrusage would count the parent's memory, which a forked child starts with
    return int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) / 2**10
mesh = make_mesh()
jax.device_put(np.ones(3)).block_until_ready()
checkpoint = open_target(sys.argv[1])
before = peak_mb()
params = load_target(checkpoint, sys.argv[2], mesh)
print(peak_mb() - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("stored", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_peak_memory_is_the_model_and_one_parameter(tmp_path: Path, stored: str, wanted: str):
    """A model of some 130 MB in float32; a whole tensor in float32 beside its bfloat16 parameter would show."""
    config = {**LLAMA, "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 3,
              "num_attention_heads": 8, "head_dim": 128, "tie_word_embeddings": True}  # fmt: skip
    kind = np.dtype(getattr(ml_dtypes, stored, None) or stored)
    tensors = {name: value.astype(kind) for name, value in target_tensors(config).items()}
    folder = write_folder(tmp_path, config, tensors)
    largest_mb = 8192 * 1024 * (2 if wanted == "bfloat16" else 4) / 2**20
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), wanted], capture_output=True, text=True, check=True
    )
    peak_mb, model_mb = map(float, done.stdout.split())
    assert peak_mb < model_mb + largest_mb + 8, f"peak {peak_mb:.0f} MB for {model_mb:.0f} MB of parameters"
