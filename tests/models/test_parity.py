"""Targets against transformers, part by part, so that a failure says where they part."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import read_rope
from dflash_jax.layers import project_out, project_qkv, rms_norm, rope_tables, swiglu
from dflash_jax.models import FAMILIES, Rows, head_weight
from dflash_jax.ops import XLA
from models import goldens
from models.goldens import MODELS, Model

TOLERANCE = 2e-4
close = functools.partial(np.testing.assert_allclose, atol=TOLERANCE, rtol=0)
each_model = pytest.mark.parametrize("name", MODELS)


def attention(p, eps: float, x: jax.Array, rows: Rows, rope, pool: jax.Array) -> jax.Array:
    """The attention part of a layer alone, from the ops that the layer is made of."""
    q, kv, pool = XLA.cache_write(pool, project_qkv(p, x), p.get("q_norm"), p.get("k_norm"), eps, *rope, rows.locations)
    return project_out(p, XLA.block_attention(q, kv, pool, rows.page_table, rows.lengths, causal=True))


@functools.cache
def forward(name: str, dtype: str = "float32") -> tuple[dict[str, np.ndarray], Model]:
    """Everything that golden.npz records, computed here in one compiled function over poisoned pools."""
    case = goldens.model(name, dtype)
    config, golden = case.config, case.golden
    rows = goldens.rows(golden["input_ids"])
    pool = goldens.poisoned_pool(config, 2, dtype)

    def run(params, pool, recorded):
        layer = params["layers"][0]
        rope = rope_tables(config.rope, config.head_dim, rows.positions)
        hidden = FAMILIES[config.family].forward(params, config, rows, pool, tuple(range(config.num_layers)))
        taps = jnp.split(hidden.taps, config.num_layers, axis=-1)
        return {
            "layer0_input_layernorm": rms_norm(recorded["hidden_0"], layer["input_norm"], config.rms_norm_eps),
            "layer0_self_attn": attention(
                layer["attn"], config.rms_norm_eps, recorded["layer0_input_layernorm"], rows, rope, pool[0]
            ),
            "layer0_mlp": swiglu(layer["mlp"], recorded["layer0_post_attention_layernorm"]),
            "hidden_0": params["embed"][rows.ids],
            **{f"hidden_{i + 1}": tap for i, tap in enumerate(taps)},
            "last": hidden.last,
            "logits": XLA.head_logits(hidden.last, head_weight(params)),
        }

    recorded = {key: jnp.asarray(value, dtype) for key, value in golden.items() if key != "input_ids"}
    return {k: np.asarray(v, np.float32) for k, v in goldens.jit(run)(case.params, pool, recorded).items()}, case


@each_model
def test_parts_of_the_first_layer(name: str):
    """Norm, attention and MLP, each from transformers' own input."""
    found, case = forward(name)
    for part in ("hidden_0", "layer0_input_layernorm", "layer0_self_attn", "layer0_mlp"):
        close(found[part], case.golden[part], err_msg=part)


@each_model
def test_every_layer_and_the_stack(name: str):
    found, case = forward(name)
    for i in range(1, case.config.num_layers + 1):
        close(found[f"hidden_{i}"], case.golden[f"hidden_{i}"], err_msg=f"after layer {i - 1}")
    close(found["last"], case.golden[f"hidden_{case.config.num_layers}"])


@each_model
def test_logits(name: str):
    found, case = forward(name)
    close(found["logits"], case.golden["logits"])
    np.testing.assert_array_equal(found["logits"].argmax(-1), case.golden["logits"].argmax(-1))


@pytest.mark.parametrize("name", [name for name in MODELS if "logits_bfloat16" in goldens.model(name).golden])
def test_bfloat16_logits(name: str):
    """As near to transformers in bfloat16 as a few roundings of 2⁻⁸ allow, and no farther from float32 than it is."""
    found, case = forward(name, "bfloat16")
    theirs, exact = case.golden["logits_bfloat16"], case.golden["logits"]
    scale = exact.std()
    assert np.abs(found["logits"] - theirs).mean() < 0.01 * scale
    assert np.abs(found["logits"] - theirs).max() < 0.1 * scale
    assert np.abs(found["logits"] - exact).mean() < 1.2 * np.abs(theirs - exact).mean() + 1e-3 * scale


def test_the_recorded_models_cover_what_matters():
    configs = [goldens.model(name).config for name in MODELS]
    assert {c.family for c in configs} == {"llama", "qwen3"}
    assert {c.rope.kind for c in configs} == {"default", "linear", "llama3", "yarn"}
    assert {c.tied for c in configs} == {True, False} and {c.attention_bias for c in configs} == {True, False}
    assert any(c.head_dim * c.num_heads != c.hidden_size for c in configs)
    assert {c.group for c in configs} >= {1, 2, 4}


@pytest.mark.parametrize("name", ["llama-linear-bias", "qwen3-yarn-tied"])
def test_a_forward_pass_in_pieces_equals_one(name: str):
    """Rows 0–9, then 10–23 over what the first piece left in the pages."""
    case = goldens.model(name)
    ids, config = case.golden["input_ids"], case.config
    pool = goldens.poisoned_pool(config, 2)
    for start, stop in ((0, 10), (10, 24)):
        rows = goldens.rows(ids[:, start:stop], start)
        run = goldens.jit(lambda params, pool, rows=rows: FAMILIES[config.family].forward(params, config, rows, pool))
        hidden = run(case.params, pool)
        pool = hidden.pool
        close(hidden.last, case.golden[f"hidden_{config.num_layers}"][:, start:stop])


@pytest.mark.parametrize("case", [c for c in goldens.ropes() if "wins" not in c["name"] and "at-top" not in c["name"]],
                         ids=lambda case: case["name"])  # fmt: skip
def test_rotary_tables_equal_transformers(case):
    """cos and sin as the layers use them, up to position 5000: the attention factor is inside."""
    rope = read_rope("config.json", case["config"], case["config"]["max_position_embeddings"])
    cos, sin = rope_tables(rope, case["config"]["head_dim"], jnp.asarray(case["positions"]))
    # 5000 times a frequency known to 6e-8 of itself: the angle is known to 3e-4.
    for mine, theirs in ((cos, case["cos"]), (sin, case["sin"])):
        np.testing.assert_allclose(mine[:4], theirs[:4], atol=2e-5)
        np.testing.assert_allclose(mine[4:], theirs[4:], atol=1e-3)
