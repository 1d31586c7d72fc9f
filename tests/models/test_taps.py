"""CASE 1: taps of any list of layers, from a target whose layers each add a known constant."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import RopeConfig, TargetConfig
from dflash_jax.models import FAMILIES
from dflash_jax.params import build
from models import goldens

LAYERS, HIDDEN, EPS = 5, 8, 1e-5


@functools.cache
def toy(family: str = "llama") -> tuple[TargetConfig, dict]:
    """Embedding row t is t everywhere; layer i adds 10^i: attention and MLP are zero but for the MLP's bias."""
    config = TargetConfig(
        family=family, vocab_size=11, hidden_size=HIDDEN, intermediate_size=4, num_layers=LAYERS, num_heads=2,
        num_kv_heads=1, head_dim=4, rms_norm_eps=EPS, rope=RopeConfig(), max_position=64, tied=True, mlp_bias=True,
    )  # fmt: skip
    params = build(FAMILIES[family].specs(config), lambda path, spec: jnp.zeros(spec.shape))
    params["embed"] = jnp.broadcast_to(jnp.arange(11.0)[:, None], (11, HIDDEN))
    params["norm"] = jnp.full(HIDDEN, 3.0)
    for i, layer in enumerate(params["layers"]):
        layer["mlp"]["down_bias"] = jnp.full(HIDDEN, 10.0**i)
    return config, params


@pytest.mark.parametrize(
    "taps", [(0,), (1, 3), (3, 1), (2, 2, 0), (4,), (4, 0, 4), tuple(range(LAYERS)), ()], ids=str
)
def test_taps_are_the_layers_asked_for_in_that_order(taps: tuple[int, ...]):
    config, params = toy()
    ids = np.array([[1, 2, 3], [7, 8, 9]])
    rows, pool = goldens.rows(ids), goldens.poisoned_pool(config, 2)
    hidden = goldens.jit(lambda p, pool: FAMILIES["llama"].forward(p, config, rows, pool, taps))(params, pool)
    after = [ids + sum(10**j for j in range(i + 1)) for i in range(LAYERS)]  # token + 1, + 11, + 111 …
    last = after[-1] / np.sqrt(np.square(after[-1], dtype=float) + EPS) * 3.0
    after[-1] = last  # Hugging Face's hidden state after the last layer is the normed one
    assert hidden.taps.shape == (2, 3, len(taps) * HIDDEN)
    for k, tap in enumerate(taps):
        found = hidden.taps[..., k * HIDDEN : (k + 1) * HIDDEN]
        np.testing.assert_allclose(found, np.repeat(after[tap][..., None], HIDDEN, -1), rtol=1e-6)
    np.testing.assert_allclose(hidden.last, np.repeat(last[..., None], HIDDEN, -1), rtol=1e-6)
