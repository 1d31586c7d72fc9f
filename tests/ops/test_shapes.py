"""The list of named shapes: real ones agree with the presets, tiny ones cover what ops must handle."""

from __future__ import annotations

import pytest

from dflash_jax.config import read_draft, read_target
from dflash_jax.errors import UserError
from dflash_jax.ops import shapes
from dflash_jax.ops.shapes import DRAFT, MODELS, PREFILL, REAL, TINY, VERIFY, ModelShape, Shape, find
from dflash_jax.presets import load_preset

DRAFTS = {shapes.SMOLLM2: shapes.SMOLLM2_DRAFT, shapes.LLAMA_8B: shapes.LLAMA_8B_DRAFT}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_models_are_the_presets(model: ModelShape):
    preset = load_preset(model.name)
    target = read_target("target", preset["target"])
    draft = read_draft("draft", preset["draft"], target)
    for config, shape in ((target, model), (draft, DRAFTS.get(model, model))):
        found = config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim
        assert found == (shape.hidden, shape.ffn, shape.heads, shape.kv_heads, shape.head_dim)
    assert (target.vocab_size, target.qk_norm) == (model.vocab, model.qk_norm)
    assert (draft.block_size, draft.num_layers, len(draft.taps)) == (model.block, model.draft_layers, model.taps)


def test_names_are_unique_and_found():
    names = [shape.name for shape in (*REAL, *TINY)]
    assert len(set(names)) == len(names)
    assert find("qwen3-8b verify 8x16 over 2048").requests == 8
    with pytest.raises(UserError, match="there is no shape 'qwen3-9b'"):
        find("qwen3-9b")


def test_real_shapes_are_the_rounds_that_matter():
    for name in ("qwen3-8b", "llama-3.1-8b", "smollm2-135m"):
        of_model = [shape for shape in REAL if shape.model.name == name]
        for role in (VERIFY, DRAFT):
            assert {shape.requests for shape in of_model if shape.role == role} >= {1, 8, 32}
        assert any(shape.role == PREFILL for shape in of_model)


def test_tiny_shapes_cover_heads_groups_roles_and_windows():
    assert {shape.model.head_dim for shape in TINY} == {16, 64, 80, 128}
    assert {shape.model.group for shape in TINY} >= {1, 2, 4}
    assert {shape.role for shape in TINY} == {VERIFY, DRAFT, PREFILL}
    assert {(shape.causal, shape.window is None) for shape in TINY} == {(a, b) for a in (0, 1) for b in (0, 1)}
    assert max(shape.num_pages * shape.page_size * shape.model.head_dim for shape in TINY) < 200_000


def test_sizes_follow_from_a_shape():
    shape = Shape(MODELS[0], VERIFY, requests=3, rows=16, committed=50, page_size=16)
    assert (shape.pages_per_slot, shape.num_pages) == (5, 16)  # 66 tokens each, and the padding page
    assert shape.lengths() == (16, 33, 50)
    assert shape.causal and not Shape(MODELS[0], DRAFT, 1, 16, 50).causal
