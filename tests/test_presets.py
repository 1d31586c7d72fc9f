"""Presets parse with the readers that the engine uses, and obey the tap rule."""

from __future__ import annotations

import json

import pytest

from dflash_jax.demo import demo_draft_path
from dflash_jax.errors import UserError
from dflash_jax.presets import list_presets, load_preset

MODELS = ["llama-3.1-8b", "qwen3-4b", "qwen3-8b", "smollm2-135m"]
MACHINES = ["cpu", "h200", "tpu7x", "v5e", "v5p", "v6e"]


def test_names():
    assert list_presets("models") == MODELS
    assert list_presets("machines") == MACHINES
    assert list_presets() == sorted(MODELS + MACHINES)


@pytest.mark.parametrize("call", [lambda: load_preset("qwen3-5b"), lambda: load_preset("../pyproject")])
def test_an_unknown_name_is_refused_with_the_known_ones(call):
    with pytest.raises(UserError, match="no preset .*known: cpu, h200, llama-3.1-8b, qwen3-4b"):
        call()


def test_an_unknown_kind_is_refused():
    with pytest.raises(UserError, match="'model' is not one of models, machines"):
        list_presets("model")


@pytest.mark.parametrize("name", MODELS)
def test_taps_follow_the_default_rule(name):
    """N target layers, n draft layers: round(1 + i * (N - 4) / (n - 1)), written out here by hand."""
    preset = load_preset(name)
    layers, taps = preset["target"]["num_hidden_layers"], len(preset["draft"]["dflash_config"]["target_layer_ids"])
    expected = [round(1 + i * (layers - 4) / (taps - 1)) for i in range(taps)]
    assert preset["draft"]["dflash_config"]["target_layer_ids"] == expected
    assert preset["draft"]["num_target_layers"] == layers


def test_the_small_pair_is_the_one_that_ships():
    shipped = demo_draft_path()
    assert shipped and load_preset("smollm2-135m")["draft"] == json.loads((shipped / "config.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_the_readers_accept_both_configurations(name):
    from dflash_jax.config import read_draft, read_target

    preset = load_preset(name)
    target = read_target(f"{name} target", preset["target"])
    draft = read_draft(f"{name} draft", preset["draft"], target)
    assert (draft.hidden_size, draft.vocab_size) == (target.hidden_size, target.vocab_size)
    assert draft.head_dim == target.head_dim
    assert 1 < draft.block_size <= 16
    assert draft.mask_token_id not in _stop_ids(preset["target"])


def test_known_shapes():
    """Figures that the design names: SmolLM2's and the Qwen3-8B pair's."""
    small = load_preset("smollm2-135m")["target"]
    assert (small["num_hidden_layers"], small["hidden_size"], small["vocab_size"]) == (30, 576, 49152)
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (9, 3)
    assert (small["rope_theta"], small["tie_word_embeddings"]) == (100000, True)
    large = load_preset("qwen3-8b")
    assert (large["target"]["intermediate_size"], large["target"]["tie_word_embeddings"]) == (12288, False)
    assert large["draft"]["block_size"] == 16
    assert load_preset("llama-3.1-8b")["draft"]["block_size"] == 10


@pytest.mark.parametrize("name", MODELS)
def test_assumed_keys_exist(name):
    preset = load_preset(name)
    for dotted in preset["notes"]["assumed"]:
        part, _, key = dotted.partition(".")
        assert part in preset and (not key or key in preset[part]), dotted


@pytest.mark.parametrize("name", MACHINES)
def test_machines_are_plausible(name):
    machine = load_preset(name)
    assert machine["platform"] in ("cpu", "gpu", "tpu")
    assert 4e9 <= machine["memory_bytes"] <= 300e9
    assert 1e10 <= machine["memory_bandwidth_bytes_per_s"] <= 1e13
    assert 1e10 <= machine["bf16_flops_per_s"] <= 3e15
    assert machine["sources"]
    assert ("aot_topology" in machine) == (machine["platform"] == "tpu")


def _stop_ids(target: dict) -> list[int]:
    stops = target["eos_token_id"]
    return stops if isinstance(stops, list) else [stops]
