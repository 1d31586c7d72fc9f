"""Configurations out of JSON: rotary settings in both forms, targets, drafts, and what they refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_jax.config import default_taps, inverse_frequencies, read_draft, read_json, read_rope, read_target
from dflash_jax.errors import UserError

DATA = Path(__file__).parent / "data"
ROPES = {case["name"]: case for case in json.loads((DATA / "rope.json").read_text())}
# transformers picks one of two contradicting values; here that is an error.
CONTRADICTING = ("theta-inside-wins-over-top", "llama3-original-at-top")
PAIR = DATA / "pairs" / "qwen3-v2"
TARGET = json.loads((PAIR / "target" / "config.json").read_text())
DRAFT = json.loads((PAIR / "draft" / "config.json").read_text())
TARGET_CONFIG = read_target("target", TARGET)


def rope_of(config: dict[str, Any]):
    return read_rope("config.json", config, config.get("max_position_embeddings", 8192))


def draft_of(inner: dict[str, Any] | None = None, **top: Any):
    """The DFlash 2 draft with keys replaced inside `dflash_config` (None removes one) and at the top level."""
    changed = {**DRAFT["dflash_config"], **(inner or {})}
    kept = {key: value for key, value in changed.items() if value is not None}
    return read_draft("draft/config.json", {**DRAFT, **top, "dflash_config": kept}, TARGET_CONFIG)


@pytest.mark.parametrize("name", [name for name in ROPES if name not in CONTRADICTING])
def test_rope_equals_transformers(name: str):
    case = ROPES[name]
    rope = rope_of(case["config"])
    found = inverse_frequencies(rope, case["config"]["head_dim"])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.asarray(case["inv_freq"], np.float32), rtol=1e-6, atol=0)
    assert rope.attention_scale == pytest.approx(case["attention_factor"], rel=1e-6)


@pytest.mark.parametrize("name", CONTRADICTING)
def test_contradicting_rope_settings_raise(name: str):
    with pytest.raises(UserError, match="given twice with different values"):
        rope_of(ROPES[name]["config"])


def test_both_rope_forms_together_must_agree():
    scaling = {"rope_type": "linear", "factor": 2.0}
    same = {"rope_theta": 5e5, "rope_scaling": scaling, "rope_parameters": {**scaling, "rope_theta": 5e5}}
    assert rope_of(same).factor == 2.0
    with pytest.raises(UserError, match=r"factor is given twice with different values: 4\.0 and 2\.0"):
        rope_of({**same, "rope_parameters": {**scaling, "factor": 4.0}})
    with pytest.raises(UserError, match="rope_type is given twice with different values: 'yarn' and 'linear'"):
        rope_of({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1, not 0.5"),
        ({"rope_theta": 0}, "rope_theta must be above 0, not 0.0"),
        ({"rope_theta": math.nan}, "rope_theta must be a number, not nan"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, not 'linear'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_slow": 0}}, "beta_slow must be above 0, not 0.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": "x"}}, "attention_factor must be a number"),
    ],
)
def test_rope_settings_that_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        rope_of(settings)


def test_target_defaults_are_those_of_hugging_face():
    bare = {key: value for key, value in TARGET.items() if key not in ("head_dim", "num_key_value_heads")}
    assert read_target("t", bare).head_dim == 128  # Qwen3's own default
    llama = read_target("t", {**bare, "architectures": ["LlamaForCausalLM"]})
    assert llama.head_dim == TARGET["hidden_size"] // TARGET["num_attention_heads"]
    assert llama.num_kv_heads == TARGET["num_attention_heads"]
    assert not llama.qk_norm


def test_generation_config_decides_the_stop_tokens():
    assert read_target("t", {**TARGET, "eos_token_id": 5}).eos_token_ids == (5,)
    assert read_target("t", {**TARGET, "eos_token_id": 5}, {"eos_token_id": [7, 8, 7]}).eos_token_ids == (7, 8)
    assert read_target("t", {**TARGET, "eos_token_id": 5}, {}).eos_token_ids == (5,)


def test_sliding_layers_follow_qwen3():
    on = {**TARGET, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 6, "layer_types": None}
    assert read_target("t", on).windows == (None,) * 6 + (4,) * 2
    assert read_target("t", {**on, "use_sliding_window": False}).windows == (None,) * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architecture GemmaForCausalLM is not supported as a target"),
        ({"architectures": 3}, "architectures must be a list of names, not 3"),
        ({"architectures": None, "model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\) is not supported"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 is not a multiple of num_key_value_heads 2"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer of at least 1, not '64'"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be at least 0, not -1e-06"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps must be a number, not inf"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, not 'yes'"),
        ({"eos_token_id": "<end>"}, "eos_token_id must be a token id or a list of them, not '<end>'"),
        ({"bos_token_id": [1]}, r"bos_token_id must be an integer of at least 0, not \[1\]"),
        ({"layer_types": ["full_attention"]}, "layer_types must list 8 layers"),
        ({"layer_types": ["mamba"] * 8}, "layer_types mamba are not supported"),
    ],
)
def test_targets_that_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(UserError, match=f"^target/config.json: .*{message}"):
        read_target("target/config.json", {**TARGET, **change})


def test_draft_reads_both_places_and_they_must_agree():
    assert draft_of(block_size=8).block_size == 8
    assert draft_of({"block_size": None}, block_size=4).block_size == 4
    with pytest.raises(UserError, match="block_size is given twice with different values: 8 and 4"):
        draft_of(block_size=4)
    with pytest.raises(UserError, match=r"target_layer_ids is given twice .*\[1, 3, 5\] and \[1, 3\]"):
        draft_of(target_layer_ids=[1, 3])


def test_default_taps():
    assert default_taps(36, 1) == (18,)
    assert default_taps(36, 5) == (1, 9, 17, 25, 33)
    assert default_taps(30, 3) == (1, 14, 27)
    assert default_taps(11, 3) == (1, round(4.5), 8)  # Python rounds halves to even
    assert draft_of({"target_layer_ids": None}).taps == default_taps(8, 3)


def test_causality_follows_layer_types_unless_the_config_says_otherwise():
    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    window = {"layer_types": mixed, "use_sliding_window": True, "sliding_window": 8}
    assert draft_of(**window).causal == (True, False, True)
    assert draft_of(**window).windows == (8, None, 8)
    assert draft_of({"is_causal": False}, **window).causal == (False,) * 3
    assert draft_of({"is_causal": True}, **window).causal == (True,) * 3


@pytest.mark.parametrize(
    ("inner", "top", "message"),
    [
        ({"mask_token_id": None}, {}, "mask_token_id is missing"),
        ({"mask_token_id": 97}, {}, "mask_token_id 97 is outside the target's vocabulary of 97"),
        ({"mask_token_id": -1}, {}, "mask_token_id -1 is outside the target's vocabulary of 97"),
        ({"mask_token_id": "96"}, {}, "mask_token_id '96' is outside"),
        ({"target_layer_ids": [1, 8]}, {}, r"target_layer_ids \[1, 8\] must name layers 0 to 7"),
        ({"target_layer_ids": [-1, 3]}, {}, r"target_layer_ids \[-1, 3\] must name layers 0 to 7"),
        ({"target_layer_ids": []}, {}, r"target_layer_ids \[\] must name layers"),
        ({"target_layer_ids": 3}, {}, "target_layer_ids must be a list of integers, not 3"),
        ({"block_size": 1}, {}, "block_size must be an integer of at least 2, not 1"),
        ({"block_size": 257}, {}, "block_size 257 is more than the 256 rows a block may have"),
        ({"block_size": None}, {"block_size": 1000000}, "block_size 1000000 is more than the 256 rows"),
        ({"block_sise": 8}, {}, "dflash_config has unknown keys block_sise"),
        ({"final_logit_softcapping": "x"}, {}, "final_logit_softcapping must be a number, not 'x'"),
        ({"conv_group_size": 24}, {}, "hidden_size 64 is not a multiple of conv_group_size 24"),
        ({"selector_top_k": 98}, {}, "selector_top_k 98 is larger than the vocabulary of 97"),
        ({"selector_rank": None}, {}, "selector_rank is missing"),
        ({}, {"architectures": ["Qwen3ForCausalLM"]}, "architecture Qwen3ForCausalLM is not a draft"),
        ({}, {"architectures": None}, r"architecture \(none\) is not a draft"),
        ({}, {"hidden_size": 128}, "hidden_size is 128 but the target has 64"),
        ({}, {"vocab_size": 96}, "vocab_size is 96 but the target has 97"),
        ({}, {"num_target_layers": 9}, "num_target_layers is 9 but the target has 8"),
        ({}, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ],
)
def test_drafts_that_are_refused(inner: dict[str, Any], top: dict[str, Any], message: str):
    with pytest.raises(UserError, match=f"^draft/config.json: .*{message}"):
        draft_of(inner, **top)


ODD = [None, "x", "", -1, 0, 3, 10**12, math.nan, math.inf, True, [], ["x"], [[1]], [-1], {}, {"a": 1},
       {"rope_type": ["x"]}, {"rope_type": "yarn", "factor": 2, "beta_fast": "x"},
       {"rope_type": "yarn", "rope_theta": 1, "factor": 2}, {"rope_type": "llama3", "factor": 8}]  # fmt: skip
EXTRA = ("rope_scaling", "rope_theta", "quantization_config", "partial_rotary_factor", "is_causal", "mlp_bias",
         "output_multiplier", "input_embedding_scale", "final_logit_softcapping")  # fmt: skip


@pytest.mark.parametrize("key", sorted({*TARGET, *DRAFT, *EXTRA}))
def test_any_odd_value_is_read_or_refused_clearly(key: str):
    """Every key with every kind of wrong value: a usable hashable configuration or a UserError, nothing else."""
    for odd in ODD:
        for read in (lambda odd=odd: read_target("t", {**TARGET, key: odd}), lambda odd=odd: draft_of(**{key: odd})):
            try:
                config = read()
            except UserError:
                continue
            hash(config)
            assert np.isfinite(inverse_frequencies(config.rope, min(config.head_dim, 256))).all()


def test_json_files_that_cannot_be_used(tmp_path: Path):
    path = tmp_path / "config.json"
    with pytest.raises(UserError, match=r"cannot read .*config.json: No such file"):
        read_json(path)
    for text, message in (("{", "is not valid JSON"), ("[1]", "holds a list, not a JSON object")):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            read_json(path)
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UserError, match="is not valid JSON"):
        read_json(path)


def test_json_of_brackets_without_end_is_one_sentence(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match="config.json is not valid JSON"):
        read_json(path)
