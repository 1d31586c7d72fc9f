"""What is exported is what our own loader reads back, and what the recorded checkpoints hold."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import goldens
from models.goldens import DATA, PAIRS

from dflash_jax.config import read_draft
from dflash_jax.errors import UserError
from dflash_jax.sharding import make_mesh
from dflash_jax.train.export import draft_json, export_draft
from dflash_jax.train.init import init_draft
from dflash_jax.weights import load_draft, open_draft
from dflash_jax.weights.sources import open_safetensors


@pytest.mark.parametrize("name", PAIRS)
def test_a_recorded_draft_comes_out_as_it_went_in(name: str, tmp_path):
    """Read, exported and read again: the same parameters, and every tensor of the original with its name and value."""
    pair, folder = goldens.pair(name), DATA / "pairs" / name / "draft"
    raw = json.loads((folder / "config.json").read_text())
    export_draft(tmp_path, raw, pair.target, pair.draft_params, "float32")
    opened = open_draft(tmp_path, pair.target)
    assert opened.config == pair.draft
    again = load_draft(opened, jnp.float32, make_mesh())
    jax.tree.map(np.testing.assert_array_equal, again, pair.draft_params)
    original, written = open_safetensors(folder), open_safetensors(tmp_path)
    names = {name for name in original.tensors if "inv_freq" not in name}
    assert {n.removesuffix(".weight") for n in names} == {n.removesuffix(".weight") for n in written.tensors}


def test_bfloat16_is_what_training_left_rounded_once(tmp_path):
    pair = goldens.pair("llama-v2-window")
    raw = json.loads((DATA / "pairs" / "llama-v2-window" / "draft" / "config.json").read_text())
    params = init_draft(pair.draft, jax.random.key(0))
    export_draft(tmp_path, raw, pair.target, params)
    written = open_safetensors(tmp_path)
    assert {info.kind for info in written.tensors.values()} == {"BF16"}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    again = load_draft(open_draft(tmp_path, pair.target), jnp.float32, make_mesh())
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    again.pop("inject")
    jax.tree.map(np.testing.assert_array_equal, again, rounded)


@pytest.mark.parametrize("version", [1, 2])
def test_a_new_configuration_reads_back(version: int):
    target = goldens.pair("qwen3-v1").target
    own = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 4, "selector_top_k": 4}
    more = {} if version == 1 else own
    raw = draft_json(
        target, version=version, layers=2, block_size=8, mask_token_id=3, taps=[1, 4], heads=4, kv_heads=2,
        head_dim=16, intermediate_size=48, **more,
    )  # fmt: skip
    config = read_draft("config.json", raw, target)
    assert (config.version, config.num_layers, config.block_size, config.taps) == (version, 2, 8, (1, 4))
    assert config.rope.theta == target.rope.theta and config.windows == (None, None) and config.causal == (False, False)


def test_a_configuration_of_another_target_is_refused(tmp_path):
    pair = goldens.pair("qwen3-v1")
    raw = json.loads((DATA / "pairs" / "qwen3-v1" / "draft" / "config.json").read_text())
    with pytest.raises(UserError, match="hidden_size is 65"):
        export_draft(tmp_path / "new", {**raw, "hidden_size": 65}, pair.target, pair.draft_params)
    assert not (tmp_path / "new").exists()
