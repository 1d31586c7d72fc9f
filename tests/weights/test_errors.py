"""Checkpoints that cannot be used: every problem named in one error, one clear sentence for each damaged file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax.errors import CheckpointError, UserError
from dflash_jax.sharding import make_mesh
from dflash_jax.weights import load_draft, load_params, load_target, open_draft, open_target
from dflash_jax.weights.tables import Table

from .tiny import DRAFT, DRAFT2, LLAMA, QWEN3, Tensors, draft_tensors, target_tensors, write_folder

Q = "model.layers.0.self_attn.q_proj.weight"


def load(folder: Path) -> Any:
    return load_target(open_target(folder), "float32", make_mesh())


def problems_of(folder: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert caught.value.where == str(folder)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def test_all_problems_come_in_one_error(tmp_path: Path):
    tensors = target_tensors(QWEN3)
    tensors["model.layers.1.mlp.gate.weight"] = tensors.pop("model.layers.1.mlp.gate_proj.weight")
    tensors["model.norm.weight"] = np.ones(16, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:49]
    del tensors["model.layers.0.self_attn.q_norm.weight"]
    tensors[Q] = np.zeros((96, 32), np.int8)
    assert set(problems_of(write_folder(tmp_path, QWEN3, tensors))) == {
        "model.layers.1.mlp.gate_proj.weight of shape [64, 32] is missing",
        "model.layers.1.mlp.gate.weight of shape [64, 32] is unexpected",
        "model.norm.weight has shape [16], expected [32]",
        "lm_head.weight has shape [49, 32], expected [50, 32]",
        "model.layers.0.self_attn.q_norm.weight of shape [16] is missing",
        f"{Q} has dtype I8, which is not supported (supported: F64, F32, F16, BF16)",
    }


def test_biases_that_the_config_does_not_announce(tmp_path: Path):
    problems = problems_of(write_folder(tmp_path, QWEN3, target_tensors(QWEN3, biases=True)))
    assert len(problems) == 8
    assert "model.layers.1.self_attn.k_proj.bias of shape [32] is unexpected" in problems


def test_missing_biases_and_head(tmp_path: Path):
    tensors = target_tensors({**LLAMA, "tie_word_embeddings": True})
    problems = problems_of(write_folder(tmp_path, {**LLAMA, "attention_bias": True}, tensors))
    assert len(problems) == 9
    assert "lm_head.weight of shape [50, 32] is missing" in problems
    assert "model.layers.0.self_attn.o_proj.bias of shape [32] is missing" in problems


def test_nothing_is_read_before_everything_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tensors = target_tensors(QWEN3)
    del tensors["lm_head.weight"]  # the last parameter of all
    checkpoint = open_target(write_folder(tmp_path, QWEN3, tensors))
    monkeypatch.setattr(checkpoint.source, "read", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(CheckpointError):
        load_target(checkpoint, "float32", make_mesh())


def test_a_table_that_forgets_a_parameter_is_a_fault_of_ours(tmp_path: Path):
    checkpoint = open_target(write_folder(tmp_path, QWEN3, target_tensors(QWEN3)))
    with pytest.raises(ValueError, match="the table and the declared parameters differ") as caught:
        load_params({"embed": ()}, Table({"norm": ()}), checkpoint.source, "float32", make_mesh())
    assert not isinstance(caught.value, UserError)


def _write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def _entry(shape: list[int], end: int, kind: str = "F32") -> dict[str, Any]:
    return {"w": {"dtype": kind, "shape": shape, "data_offsets": [0, end]}}


def _cut(path: Path, keep: float) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * keep)])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "is not a safetensors file: it has 0 bytes"),
    "end cut off": (lambda p: _cut(p, 0.9), r"is truncated: .* ends at byte \d+ of \d+"),
    "header cut off": (lambda p: p.write_bytes(p.read_bytes()[:100]), "is truncated: its header ends at byte"),
    "text": (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\n"), "is not a safetensors file"),
    "header not JSON": (lambda p: _write_raw(p, b"{nonsense"), "its header is not JSON"),
    "header not UTF-8": (lambda p: _write_raw(p, b'{"\xff": 1}'), "its header is not JSON"),
    "header a list": (lambda p: _write_raw(p, [1]), "its header is a list"),
    "entry not an object": (lambda p: _write_raw(p, {"w": 3}), "is damaged: its header describes w as 3"),
    "negative shape": (lambda p: _write_raw(p, _entry([-1], 4)), "is damaged: its header describes w"),
    "bytes too few": (lambda p: _write_raw(p, _entry([2], 4), bytes(4)), r"w of shape \[2\] needs 8 bytes, not 4"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_safetensors(tmp_path: Path, name: str):
    damage, message = DAMAGE[name]
    folder = write_folder(tmp_path, LLAMA, target_tensors(LLAMA))
    damage(folder / "model.safetensors")
    with pytest.raises(UserError, match=f"{folder / 'model.safetensors'} .*{message}"):
        load(folder)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path):
    checkpoint = open_target(write_folder(tmp_path, LLAMA, target_tensors(LLAMA)))
    _cut(tmp_path / "model.safetensors", 0.5)
    with pytest.raises(UserError, match=r"model.safetensors is truncated: \d+ bytes wanted at byte \d+, \d+ found"):
        load_target(checkpoint, "float32", make_mesh())


@pytest.mark.parametrize("kind", ["I8", "F8_E4M3", "U8", "BOOL"])
def test_dtypes_that_are_not_weights(tmp_path: Path, kind: str):
    folder = write_folder(tmp_path, LLAMA, target_tensors(LLAMA))
    _write_raw(folder / "model.safetensors", _entry([4], 4, kind), bytes(4))
    assert "w of shape [4] is unexpected" in problems_of(folder)


def test_folders_without_weights(tmp_path: Path):
    with pytest.raises(UserError, match="has no config.json"):
        open_target(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(UserError, match="has no weights: no model.safetensors and no model.safetensors.index.json$"):
        open_target(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"has no weights: .*found pytorch_model.bin; .* need converting"):
        open_target(tmp_path)
    for name in "ab":
        save_file({name: np.ones(1, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UserError, match="several safetensors files but no .*index.json: a.safetensors, b.safetensors"):
        open_target(tmp_path)


def test_json_that_is_not_json(tmp_path: Path):
    folder = write_folder(tmp_path, LLAMA, target_tensors(LLAMA), shards=2)
    index, config = folder / "model.safetensors.index.json", folder / "config.json"
    good = config.read_text()
    for path, text, message in (
        (config, "{'a': 1}", "config.json is not valid JSON"),
        (config, "[]", "config.json holds a list, not a JSON object"),
        (index, "{", "index.json is not valid JSON"),
        (index, "{}", "weight_map must map tensor names to file names"),
        (index, '{"weight_map": {"a": 3}}', "weight_map must map tensor names to file names"),
    ):
        config.write_text(good)
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            open_target(folder)


def test_an_index_that_does_not_fit_its_files(tmp_path: Path):
    folder = write_folder(tmp_path, LLAMA, target_tensors(LLAMA), shards=3)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], "ghost": "model-00001-of-00003.safetensors"}}))
    with pytest.raises(CheckpointError, match="lists ghost, which is in none of its files"):
        open_target(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="names model-00002-of-00003.safetensors, which is not there"):
        open_target(folder)


def test_a_tensor_in_two_files(tmp_path: Path):
    folder = write_folder(tmp_path, LLAMA, target_tensors(LLAMA), shards=2)
    both = {"model.norm.weight": np.ones(32, np.float32), "lm_head.weight": np.ones((50, 32), np.float32)}
    save_file(both, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(
        CheckpointError, match="model.norm.weight is in model-00002-of-00002.safetensors and in another"
    ):
        open_target(folder)


# Drafts


def load_draft_of(folder: Path, config: dict[str, Any], tensors: Tensors) -> Any:
    target = open_target(write_folder(folder / "target", QWEN3, target_tensors(QWEN3))).config
    return load_draft(open_draft(write_folder(folder / "draft", config, tensors), target), "float32", make_mesh())


def test_wrong_fc_width_says_where_the_width_comes_from(tmp_path: Path):
    config = {**DRAFT, "dflash_config": {"mask_token_id": 49, "target_layer_ids": [0]}}
    with pytest.raises(CheckpointError) as caught:
        load_draft_of(tmp_path, config, draft_tensors(DRAFT))
    assert caught.value.problems == (
        "fc.weight has shape [32, 64], expected [32, 32] (1 target_layer_ids × hidden_size 32)",
    )


def test_unknown_and_missing_draft_tensors(tmp_path: Path):
    tensors = draft_tensors(DRAFT2)
    tensors["lm_head.weight"] = np.ones((50, 32), np.float32)  # a head of its own is not of this layout
    tensors["candidate_selector.hidden.weight"] = tensors.pop("candidate_selector.hidden_projection.weight")
    del tensors["layers.1.mlp_conv.base_kernel"]
    with pytest.raises(CheckpointError) as caught:
        load_draft_of(tmp_path, DRAFT2, tensors)
    assert set(caught.value.problems) == {
        "lm_head.weight of shape [50, 32] is unexpected",
        "candidate_selector.hidden.weight of shape [6, 32] is unexpected",
        "candidate_selector.hidden_projection.weight of shape [6, 32] is missing",
        "layers.1.mlp_conv.base_kernel of shape [2, 3, 32] is missing",
    }


def test_a_draft2_read_as_v1_has_unknown_tensors(tmp_path: Path):
    with pytest.raises(CheckpointError, match="layers.0.attention_conv.base_kernel of shape .* is unexpected"):
        load_draft_of(tmp_path, DRAFT, draft_tensors(DRAFT2))


def test_two_spellings_of_one_tensor(tmp_path: Path):
    tensors = draft_tensors(DRAFT2)
    name = "candidate_selector.successor_codebook"
    tensors[f"{name}.weight"] = tensors[name]
    with pytest.raises(CheckpointError, match=f"{name} and {name}.weight are two names of one tensor"):
        load_draft_of(tmp_path, DRAFT2, tensors)


def test_target_and_draft_exchanged(tmp_path: Path):
    target = write_folder(tmp_path / "target", QWEN3, target_tensors(QWEN3))
    draft = write_folder(tmp_path / "draft", DRAFT, draft_tensors(DRAFT))
    with pytest.raises(UserError, match="architecture DFlashDraftModel is not supported as a target"):
        open_target(draft)
    with pytest.raises(UserError, match="architecture Qwen3ForCausalLM is not a draft"):
        open_draft(target, open_target(target).config)


def test_a_file_where_a_folder_belongs(tmp_path: Path):
    folder = write_folder(tmp_path, QWEN3, target_tensors(QWEN3))
    with pytest.raises(
        UserError, match="model.safetensors is a file; a target is a folder with config.json or a .gguf"
    ):
        open_target(folder / "model.safetensors")
    with pytest.raises(UserError, match="config.json is a file; a draft is a folder"):
        open_draft(folder / "config.json", open_target(folder).config)
