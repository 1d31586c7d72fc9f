"""Weights turned for the CPU: the same products, and nothing kept twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import Turned, dot, flat_inputs
from dflash_jax.params import device_bytes
from dflash_jax.weights.turned import turn

rng = np.random.default_rng(0)


def weights(tied: bool):
    draw = {
        "qkv": (16, 2, 4, 8), "o": (4, 8, 16), "gate_up": (16, 2, 24), "down": (24, 16), "norm": (16,),
        "embed": (50, 16),
    }  # fmt: skip
    made = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in draw.items()}
    layer = {"attn": {"qkv": made["qkv"], "o": made["o"]}, "mlp": {"gate_up": made["gate_up"], "down": made["down"]}}
    head = {} if tied else {"head": made["embed"] + 1.0}
    return {"embed": made["embed"], "layers": (layer,), "norm": made["norm"], **head}


@pytest.mark.parametrize(("path", "axes"), [(("attn", "qkv"), 1), (("attn", "o"), 2), (("mlp", "gate_up"), 1)])
def test_products_are_the_same(path, axes):
    plain = weights(True)["layers"][0][path[0]][path[1]]
    turned = turn({path[1]: plain})[path[1]]
    x = jnp.asarray(rng.standard_normal((2, 3, int(np.prod(plain.shape[:axes])))), jnp.float32)
    found, wanted = dot(x, flat_inputs(turned, axes)), dot(x, flat_inputs(plain, axes))
    assert isinstance(turned, Turned)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_used_as_it_lies_and_bytes_stay(tied):
    params = weights(tied)
    wanted, size = params.get("head", params["embed"]), device_bytes(params)
    turned = turn(params)
    assert turned["head"].array is wanted
    assert turned["embed"] is params["embed"]
    assert device_bytes(turned) == size
    assert not isinstance(turned["norm"], Turned)


def test_the_compiler_keeps_the_product_turned():
    """It would make the ordinary, slower product of it, or copy the weight."""
    x, w = jnp.ones((8, 64)), turn({"down": jnp.ones((64, 96))})["down"]
    text = jax.jit(dot).lower(x, w).compile().as_text() or ""
    assert "f32[96,8]{1,0} dot(" in text
    assert "f32[64,96]" not in text


@pytest.mark.parametrize(("rows", "multiplied"), [(1, 1), (4, 4), (5, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 17)])
def test_products_of_slow_row_counts_are_filled_up(rows, multiplied):
    """Seven rows take the CPU longer than eight; those that were filled in are not in the result."""
    x = jnp.asarray(rng.standard_normal((rows, 64)), jnp.float32)
    plain = jnp.asarray(rng.standard_normal((64, 96)), jnp.float32)
    w = turn({"down": plain})["down"]
    np.testing.assert_allclose(dot(x, w), dot(x, plain), rtol=1e-5, atol=1e-5)
    assert f"tensor<96x{multiplied}xf32>" in jax.jit(dot).lower(x, w).as_text()
