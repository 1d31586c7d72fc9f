"""The decoder both target families share: rows in, hidden states and taps out, KV written in place."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from dflash_jax import axes
from dflash_jax.cache import Pool
from dflash_jax.config import TargetConfig
from dflash_jax.layers import layer_specs, norm_spec, project_out, project_qkv, rms_norm, rope_tables, swiglu
from dflash_jax.ops import XLA, Kernels
from dflash_jax.params import Params, ParamSpec


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a forward pass and where they live.

    ids, positions, locations int32 [S, B]; page_table int32 [S, W]; lengths int32 [S]: committed tokens
    before row 0 (so row i sits at position lengths + i).  `prefill` picks the attention op.
    """

    ids: Array
    positions: Array
    locations: Array
    page_table: Array
    lengths: Array
    kernels: Kernels = XLA
    prefill: bool = False

    @property
    def attention(self) -> Any:
        return self.kernels.prefill_attention if self.prefill else self.kernels.block_attention


class Hidden(NamedTuple):
    """last [S, B, H]: after the final norm; taps [S, B, K·H] in the order asked for; the pool with KV written."""

    last: Array
    taps: Array
    pool: Pool


def decoder_specs(config: TargetConfig) -> dict[str, Any]:
    """Declarations of a whole target.  A tied target has no `head`: its embedding [V, H] serves."""
    specs: dict[str, Any] = {
        "embed": ParamSpec((config.vocab_size, config.hidden_size), (axes.VOCAB, axes.EMBED)),
        "layers": tuple(layer_specs(config, config.mlp_bias) for _ in range(config.num_layers)),
        "norm": norm_spec(config.hidden_size),
    }
    if not config.tied:
        specs["head"] = ParamSpec((config.vocab_size, config.hidden_size), (axes.VOCAB, axes.EMBED))
    return specs


def head_weight(params: Params) -> Array:
    """The output head [V, H]; whether it is the embedding is the target's decision."""
    return params.get("head", params["embed"])


def embed(params: Params, ids: Array, scale: float = 1.0) -> Array:
    """Rows [..., H] of the embedding table, × scale."""
    x = params["embed"][ids]
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


def attend(p: Params, config: Any, x: Array, rows: Rows, rope: tuple[Array, Array], pool: Array, window: int | None):
    """One causal attention layer over the committed pages and the rows themselves: (out [S, B, H], pool)."""
    q, kv, pool = rows.kernels.cache_write(
        pool, project_qkv(p, x), p.get("q_norm"), p.get("k_norm"), config.rms_norm_eps, *rope, rows.locations
    )
    out = rows.attention(q, kv, pool, rows.page_table, rows.lengths, causal=True, window=window)
    return project_out(p, out), pool


def decode_rows(params: Params, config: TargetConfig, rows: Rows, pool: Pool, taps: tuple[int, ...] = ()) -> Hidden:
    """Run the target over `rows`.  Layers are unrolled (a scan over stacked weights is far slower on GPU).

    Tap i is the hidden state after layer i, which for the last layer means after the final norm
    (Hugging Face's `hidden_states[i + 1]`).
    """
    x = embed(params, rows.ids)
    rope = rope_tables(config.rope, config.head_dim, rows.positions)
    written, after = [], []
    for i, layer in enumerate(params["layers"]):
        y = rms_norm(x, layer["input_norm"], config.rms_norm_eps)
        y, layer_pool = attend(layer["attn"], config, y, rows, rope, pool[i], config.window(i))
        x = x + y
        x = x + swiglu(layer["mlp"], rms_norm(x, layer["post_norm"], config.rms_norm_eps))
        written.append(layer_pool)
        after.append(x)
    last = rms_norm(x, params["norm"], config.rms_norm_eps)
    after[-1] = last
    captured = jnp.concatenate([after[i] for i in taps], axis=-1) if taps else last[..., :0]
    return Hidden(last, captured, tuple(written))
