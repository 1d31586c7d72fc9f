"""GGUF targets: layout, quantisations, metadata, and damaged or unsupported files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from dflash_jax.config import inverse_frequencies
from dflash_jax.config.gguf_header import Unread, read_gguf_header
from dflash_jax.errors import CheckpointError, UserError
from dflash_jax.sharding import make_mesh
from dflash_jax.weights import load_target, loader, open_target

from .tiny import GGUF, LLAMA, QWEN3, Tensors, target_tensors, write_folder, write_tiny_gguf

TOKENIZER = {"tokens": [f"t{i}" for i in range(50)], "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip


def load(path: Path, dtype: Any = "float32") -> Any:
    return load_target(open_target(path), dtype, make_mesh())


def write(path: Path, config: dict[str, Any], tensors: Tensors | None = None, quant: str = "F32", **more: Any) -> Path:
    file = path / "tiny.gguf"
    write_tiny_gguf(file, config, target_tensors(config) if tensors is None else tensors, quant, TOKENIZER, **more)
    return file


@pytest.mark.parametrize(
    "config",
    [LLAMA, {**LLAMA, "tie_word_embeddings": True}, {**LLAMA, "num_key_value_heads": 4}, QWEN3],
    ids=["untied", "tied", "as many kv heads", "qwen3"],
)
def test_equals_the_hugging_face_folder(tmp_path: Path, config: dict[str, Any]):
    tensors = target_tensors(config)
    folder = open_target(write_folder(tmp_path / "hf", config, tensors))
    file = open_target(write(tmp_path, config, tensors))
    expected, found = (load_target(checkpoint, "float32", make_mesh()) for checkpoint in (folder, file))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert file.config.rms_norm_eps == np.float32(folder.config.rms_norm_eps)
    for field in ("family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "group",
                  "head_dim", "rope", "max_position", "tied", "eos_token_ids", "bos_token_id"):  # fmt: skip
        assert getattr(file.config, field) == getattr(folder.config, field), field


def test_llama_rows_are_stored_permuted_and_qwen3_rows_are_not(tmp_path: Path):
    """By hand: ggml stores pairs (i, i + D/2) of a head side by side."""
    for config, permuted in ((LLAMA, True), (QWEN3, False)):
        tensors = target_tensors(config)
        file = write(tmp_path, config, tensors)
        reader = gguf.GGUFReader(file)
        stored = next(tensor.data for tensor in reader.tensors if tensor.name == "blk.0.attn_k.weight")
        key = load(file)["layers"][0]["attn"]["qkv"][:, 1, -2]  # second kv head: [H, D]
        order = [half + i for i in range(8) for half in (0, 8)] if permuted else range(16)
        np.testing.assert_array_equal(stored[16:], np.asarray(key).T[list(order)])


def test_biases_are_permuted_with_their_rows(tmp_path: Path):
    config = {**LLAMA, "attention_bias": True, "mlp_bias": True}
    tensors = target_tensors(config, biases=True)
    file = write(tmp_path, config, tensors)
    assert open_target(file).config.attention_bias and open_target(file).config.mlp_bias
    expected = load(write_folder(tmp_path / "hf", config, tensors))
    jax.tree.map(np.testing.assert_array_equal, load(file), expected)


@pytest.mark.parametrize("quant", GGUF.KINDS)
def test_every_quantisation_equals_the_library(tmp_path: Path, quant: str, monkeypatch: pytest.MonkeyPatch):
    config = {**QWEN3, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 128,
              "num_attention_heads": 2}  # fmt: skip
    file = write(tmp_path, config, quant=quant)
    monkeypatch.setattr(loader, "BLOCK_ELEMENTS", 5000)  # several parts a tensor, none a whole number of them
    params = load(file)
    for tensor in gguf.GGUFReader(file).tensors:
        whole = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name == "token_embd.weight":
            assert tensor.tensor_type == Kind[quant]
            np.testing.assert_array_equal(params["embed"], whole)
        if tensor.name == "blk.0.ffn_down.weight":
            np.testing.assert_array_equal(params["layers"][0]["mlp"]["down"], whole.T)


def test_llama3_scaling_comes_from_its_tensor(tmp_path: Path):
    config = {**LLAMA, "rope_theta": 500.0, "rope_scaling": LLAMA3}
    rope = open_target(write(tmp_path, config)).config.rope
    expected = open_target(write_folder(tmp_path / "hf", config, target_tensors(config))).config.rope
    assert rope.freq_divisors[0] < rope.freq_divisors[-1] == 8.0
    np.testing.assert_allclose(inverse_frequencies(rope, 16), inverse_frequencies(expected, 16), rtol=1e-6)
    load(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_comes_from_the_metadata(tmp_path: Path, kind: str):
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 32}
    config = {**QWEN3, "rope_theta": 1e6, "rope_parameters": scaling | {"rope_theta": 1e6}}
    rope = open_target(write(tmp_path, config)).config.rope
    assert rope == open_target(write_folder(tmp_path / "hf", config, target_tensors(config))).config.rope
    assert rope.kind == kind


def _rewrite(path: Path, changes: dict[str, Any], drop: tuple[str, ...] = (), kinds: dict[str, Kind] | None = None):
    """The file with keys replaced (None removes one), tensors dropped, or tensors relabelled as another type."""
    old = gguf.GGUFReader(path)
    architecture = changes.get("general.architecture", "llama")
    writer = gguf.GGUFWriter(path.with_suffix(".new"), architecture)
    for key, field in old.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in changes:
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
    for key, value in changes.items():
        if value is not None and key != "general.architecture":
            kind = gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    for tensor in old.tensors:
        if tensor.name not in drop:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=(kinds or {}).get(tensor.name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"llama.vocab_size": None}, "vocab_size", 50),
        ({"llama.rope.freq_base": None}, "rope.theta", 10000.0),
        ({"llama.attention.head_count_kv": None}, "num_kv_heads", 4),
        ({"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 8}, "eos_token_ids", (2, 7, 8)),
        ({"tokenizer.ggml.eot_token_id": 2}, "eos_token_ids", (2,)),
        ({"tokenizer.ggml.eos_token_id": None}, "eos_token_ids", ()),
        ({"llama.rope.scaling.type": "none"}, "rope.kind", "default"),
        ({"llama.rope.scale_linear": 4.0}, "rope.factor", 4.0),
        ({"llama.expert_count": 0}, "family", "llama"),
    ],
)
def test_metadata_with_other_keys(tmp_path: Path, changes: dict[str, Any], field: str, expected: Any):
    file = write(tmp_path, LLAMA)
    _rewrite(file, changes)
    value = open_target(file).config
    for name in field.split("."):
        value = getattr(value, name)
    assert value == expected


def test_yarn_settings_of_the_metadata(tmp_path: Path):
    file = write(tmp_path, {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    _rewrite(file, {"llama.rope.scaling.yarn_beta_fast": 16.0, "llama.rope.scaling.attn_factor": 0.5})
    rope = open_target(file).config.rope
    assert (rope.beta_fast, rope.beta_slow, rope.original_max_position) == (16.0, 1.0, 128)
    assert rope.attention_scale == pytest.approx(0.5 * (0.1 * np.log(4.0) + 1.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma"}, r"GGUF architecture 'gemma' is not supported \(supported: llama, qwen3\)"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": "two"}, "llama.block_count must be an integer of at least 1, not 'two'"),
        ({"split.count": 3}, "one of 3 parts of a split GGUF file"),
        ({"llama.expert_count": 8}, "llama.expert_count 8 is not supported"),
        ({"llama.rope.dimension_count": 8}, "partial_rotary_factor 0.5 is not supported"),
        ({"llama.attention.value_length": 8}, "keys of width 16 and values of width 8 are not supported"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "rope type 'longrope'"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
    ],
)
def test_metadata_that_is_refused(tmp_path: Path, changes: dict[str, Any], message: str):
    file = write(tmp_path, LLAMA)
    _rewrite(file, changes)
    with pytest.raises(UserError, match=f"^{file}:? .*{message}"):
        open_target(file)


def test_all_tensor_problems_come_in_one_error(tmp_path: Path):
    file = write(tmp_path, LLAMA)
    _rewrite(file, {"llama.feed_forward_length": 128}, drop=("blk.0.attn_norm.weight", "output_norm.weight"))
    with pytest.raises(CheckpointError) as caught:
        load(file)
    assert set(caught.value.problems) == {
        "blk.0.attn_norm.weight of shape [32] is missing",
        "output_norm.weight of shape [32] is missing",
        *(
            f"blk.{i}.ffn_{part}.weight has shape [64, 32], expected [128, 32]"
            for i in (0, 1)
            for part in ("gate", "up")
        ),
        *(f"blk.{i}.ffn_down.weight has shape [32, 64], expected [32, 128]" for i in (0, 1)),
    }


def test_types_that_cannot_be_dequantised(tmp_path: Path):
    file = write(tmp_path, LLAMA)
    raw = bytearray(file.read_bytes())
    name = b"output_norm.weight"
    at = raw.index(name) + len(name) + 4 + 8  # rank, one width, then the type
    assert raw[at : at + 4] == struct.pack("<I", Kind.F32)
    for number, message in (
        (Kind.I32, "has GGUF type I32, which `gguf` cannot dequantise"),
        (999, "has GGUF type 999"),
    ):
        raw[at : at + 4] = struct.pack("<I", number)
        file.write_bytes(raw)
        with pytest.raises(CheckpointError, match=f"output_norm.weight {message}"):
            load(file)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.5, 0.99])
def test_truncated_files(tmp_path: Path, share: float):
    file = write(tmp_path, LLAMA)
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(UserError, match=f"^{file} is (truncated|not a usable GGUF file)"):
        open_target(file)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGML", "it starts with b'GGML', not b'GGUF'"),
        (4, b"\x01\0\0\0", "version 1 is not one of"),
        (4, b"\0\0\0\x03", "in little-endian byte order"),
        (8, b"\xff" * 8, "not a usable GGUF file"),
        (16, b"\xff" * 8, "not a usable GGUF file"),
        (24, b"\xff" * 8, "is truncated"),
    ],
)
def test_damaged_headers(tmp_path: Path, at: int, value: bytes, message: str):
    file = write(tmp_path, LLAMA)
    raw = file.read_bytes()
    file.write_bytes(raw[:at] + value + raw[at + len(value) :])
    with pytest.raises(UserError, match=f"^{file} .*{message}"):
        open_target(file)


def test_every_cut_of_the_header_is_noticed(tmp_path: Path):
    file = write(tmp_path, {**LLAMA, "num_hidden_layers": 1})
    raw = file.read_bytes()
    data = min(tensor.offset for tensor in read_gguf_header(file).tensors.values())
    for end in range(0, data - 32, 37):  # up to 31 bytes before the data are padding
        file.write_bytes(raw[:end])
        with pytest.raises(UserError, match="not a usable GGUF file"):
            read_gguf_header(file)
        with pytest.raises(UserError, match="not a usable GGUF file"):
            read_gguf_header(file, arrays=True)


def test_header_values(tmp_path: Path):
    file = write(tmp_path, LLAMA)
    short, full = read_gguf_header(file), read_gguf_header(file, arrays=True)
    assert short.pairs["tokenizer.ggml.tokens"] == Unread(50)
    assert full.pairs["tokenizer.ggml.tokens"] == TOKENIZER["tokens"]
    assert full.pairs["tokenizer.ggml.token_type"] == [1] * 50
    assert short.tensors == full.tensors
    assert {key: value for key, value in short.pairs.items() if not isinstance(value, Unread)} == {
        key: value for key, value in full.pairs.items() if not isinstance(value, list)
    }
    for tensor in gguf.GGUFReader(file).tensors:
        assert full.tensors[tensor.name].offset == tensor.data_offset
        assert full.tensors[tensor.name].shape == tuple(int(n) for n in reversed(tensor.shape))
