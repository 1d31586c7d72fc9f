"""The DFlash draft network (v1 and DFlash 2), arXiv:2602.06036.

Context reaches it only as keys and values: taps of the target → `fc` → `hidden_norm` → K/V of every layer,
written to the draft pool as tokens are committed.  A block is one pass of B rows over that pool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax import axes
from dflash_jax.cache import Pool
from dflash_jax.config import ConvConfig, DraftConfig
from dflash_jax.layers import (
    Following,
    dot,
    followers,
    layer_specs,
    norm_spec,
    project_out,
    project_out_norm,
    project_qkv,
    rms_norm,
    rope_tables,
    swiglu,
    swiglu_norm,
)
from dflash_jax.models.decoder import Rows
from dflash_jax.ops import Kernels, align
from dflash_jax.params import Params, ParamSpec


def draft_specs(config: DraftConfig) -> dict[str, Any]:
    """Declarations of a draft as its checkpoint has them (`with_injection` adds what serving derives)."""
    hidden = config.hidden_size
    layers = tuple(_layer_specs(config) for _ in range(config.num_layers))
    specs: dict[str, Any] = {
        "fc": ParamSpec((len(config.taps) * hidden, hidden), (axes.TAPS, axes.EMBED)),
        "hidden_norm": norm_spec(hidden),
        "layers": layers,
        "norm": norm_spec(hidden),
    }
    if config.selector:
        rank = config.selector.rank
        codebook = ParamSpec((config.vocab_size, rank), (axes.VOCAB, axes.RANK))
        specs["selector"] = {
            "predecessor": codebook,
            "successor": codebook,
            "hidden": ParamSpec((hidden, rank), (axes.EMBED, axes.RANK)),
        }
    return specs


def _layer_specs(config: DraftConfig) -> dict[str, Any]:
    specs = layer_specs(config)
    if config.conv:
        specs["attn_conv"] = _conv_specs(config.hidden_size, config.conv)
        specs["mlp_conv"] = _conv_specs(config.hidden_size, config.conv)
    return specs


def _conv_specs(hidden: int, conv: ConvConfig) -> dict[str, ParamSpec]:
    groups = hidden // conv.group_size
    return {
        "base": ParamSpec((2, conv.kernel_size, hidden), (None, None, axes.EMBED), "zeros"),
        "kernel": ParamSpec((hidden, 2, conv.kernel_size, groups), (axes.EMBED, None, None, axes.CONV_GROUPS)),
    }


def with_injection(params: Params, config: DraftConfig) -> Params:
    """`params` plus the key/value projections of all layers side by side, for one product a commit.

    Adds `inject` {weight [H, L, 2, G, D], k_norm [L, D], bias [L, 2, G, D]}: copies of a few per cent of the
    draft, made once at load.
    """
    attention = [layer["attn"] for layer in params["layers"]]
    inject = {
        "weight": jnp.stack([jnp.moveaxis(p["qkv"][:, :, config.group :], 2, 1) for p in attention], axis=1),
        "k_norm": jnp.stack([p["k_norm"] for p in attention]),
    }
    if config.attention_bias:
        inject["bias"] = jnp.stack([jnp.moveaxis(p["qkv_bias"][:, config.group :], 1, 0) for p in attention])
    return {**params, "inject": inject}


def fuse_context(params: Params, config: DraftConfig, taps: Array) -> Array:
    """taps [S, T, K·H] of the target → the fused context [S, T, H] that all draft layers share."""
    return rms_norm(dot(taps, params["fc"]), params["hidden_norm"], config.rms_norm_eps)


def inject_context(
    params: Params, config: DraftConfig, taps: Array, positions: Array, locations: Array, pool: Pool, kernels: Kernels
) -> Pool:
    """Write the context of committed rows to the draft pool: taps [S, T, K·H], positions, locations [S, T]."""
    rope = rope_tables(config.rope, config.head_dim, positions)
    inject = params["inject"]
    fused = fuse_context(params, config, taps)
    return kernels.kv_inject(
        pool, fused, inject["weight"], inject.get("bias"), inject["k_norm"], config.rms_norm_eps, *rope, locations
    )


def draft_rows(params: Params, config: DraftConfig, embedded: Array, rows: Rows, pool: Pool) -> Array:
    """Hidden states [S, B, H] of a block whose input embeddings are `embedded` [S, B, H].

    Reads the draft pool, writes nothing: a block's own keys and values are scratch.
    """
    rope = rope_tables(config.rope, config.head_dim, rows.positions)
    x, y = embedded, rms_norm(embedded, params["layers"][0]["input_norm"], config.rms_norm_eps)
    for i, (layer, then) in enumerate(zip(params["layers"], followers(params), strict=True)):
        x, y = _draft_layer(config, config.causal[i], config.windows[i], layer, then, x, y, rows, rope, pool[i])
    return y


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # for its cache: equal layers are traced and lowered once
def _draft_layer(
    config: DraftConfig,
    causal: bool,
    window: int | None,
    p: Params,
    then: Following,
    x: Array,
    y: Array,
    rows: Rows,
    rope: tuple[Array, Array],
    pool: Array,
) -> tuple[Array, Array]:
    """One layer over x [S, B, H]: attention over the committed context and the block, then SwiGLU.

    y: x after the layer's own norm.  Returns x, and x after `then.norm`.
    """
    attn, mlp, eps, kernels = p["attn"], p["mlp"], config.rms_norm_eps, rows.kernels

    def attend(y: Array) -> Array:
        projected = project_qkv(attn, y, kernels), attn["q_norm"], attn["k_norm"], eps, *rope
        attention = kernels.draft_attention
        return attention(pool, *projected, rows.page_table, rows.lengths, causal=causal, window=window)

    if config.conv is None:
        x, y = project_out_norm(attn, attend(y), x, Following(p["post_norm"], mlp["gate_up"]), eps, kernels)
        return swiglu_norm(mlp, y, x, then, eps, kernels)
    attended = _convolved(p["attn_conv"], config.conv, y, kernels, lambda y: project_out(attn, attend(y)))
    x, y = kernels.add_norm(x, attended, p["post_norm"], eps)
    mixed = _convolved(p["mlp_conv"], config.conv, y, kernels, lambda y: swiglu(mlp, y, kernels))
    return kernels.add_norm(x, mixed, then.norm, eps)


def _convolved(p: Params, conv: ConvConfig, x: Array, kernels: Kernels, sublayer: Callable[[Array], Array]) -> Array:
    """`sublayer(x)` with DFlash 2's convolutions around it (both sides use kernels computed from x)."""
    delta = kernels.project(x, p["kernel"])  # [S, B, 2, taps, groups]
    y = sublayer(convolve(x, p["base"][0], delta[..., 0, :, :], conv.group_size))
    return convolve(y, p["base"][1], delta[..., 1, :, :], conv.group_size)


def convolve(x: Array, base: Array, delta: Array, group_size: int) -> Array:
    """y[i, c] = Σ_t (base[t, c] + delta[i, t, group of c]) · x[i − t, c], zero before the block.

    x [S, B, H]; base [taps, H]; delta [S, B, taps, H / group_size].
    """
    out = jnp.zeros_like(x)
    for t in range(base.shape[0]):
        shifted = x if t == 0 else jnp.pad(x, ((0, 0), (t, 0), (0, 0)))[:, : x.shape[1]]
        out = out + (align(base[t], x) + jnp.repeat(delta[..., t, :], group_size, axis=-1)) * shifted
    return out


def select_candidates(
    params: Params, hidden: Array, likeliest: tuple[Array, Array], anchor: Array, rows: Rows | None = None
) -> Array:
    """DFlash 2's walk over each position's best candidates: int32 [S, B−1].

    hidden [S, B−1, H] of the rows after the anchor int32 [S]; likeliest: their best logits and whose these are, each
    [S, B−1, K], of equals the lowest id first, as `top_tokens` gives them.
    score(a → b) = logit[b] + ⟨A[a] ⊙ (W·h), S[b]⟩, each position choosing given the one before
    (greedily, or as `rows` choose: a sample of softmax(score / T) where the request samples).
    """
    p, (unary, candidates) = params["selector"], likeliest
    projected = dot(hidden, p["hidden"])
    previous, path = anchor, []
    for k in range(hidden.shape[1]):
        pair = pair_scores(p, projected[:, k], previous, candidates[:, k])
        scores, here = (unary[:, k] + pair)[:, None], candidates[:, k : k + 1]
        best = rows.choose(scores, rows.positions[:, k + 1 : k + 2], here) if rows else scores.argmax(axis=-1)
        previous = jnp.take_along_axis(here[:, 0], best, axis=1)[:, 0].astype(jnp.int32)
        path.append(previous)
    return jnp.stack(path, axis=1)


def pair_scores(p: Params, projected: Array, previous: Array, candidates: Array) -> Array:
    """⟨A[a] ⊙ W·h, S[b]⟩ of the selector `p`, float32 [..., K].

    projected [..., rank] = W·h; previous int32 [...] a; candidates int32 [..., K] b.
    """
    left = p["predecessor"][previous] * projected
    right = p["successor"][candidates]  # [..., K, rank]
    return (left[..., None, :].astype(jnp.float32) * right.astype(jnp.float32)).sum(axis=-1)
