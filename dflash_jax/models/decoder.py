"""The decoder both target families share: rows in, hidden states and taps out, KV written in place."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax import axes
from dflash_jax.cache import Pool
from dflash_jax.config import TargetConfig
from dflash_jax.layers import (
    Following,
    followers,
    layer_specs,
    norm_spec,
    project_out_norm,
    project_qkv,
    rms_norm,
    rope_tables,
    swiglu_norm,
)
from dflash_jax.ops import (
    FILTER,
    GREEDY,
    XLA,
    EditRows,
    Kernels,
    SamplingRows,
    Turned,
    edited_logits,
    first_largest,
)
from dflash_jax.params import Params, ParamSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a forward pass and where they live.

    ids, positions, locations int32 [S, B]; page_table int32 [S, W]; lengths int32 [S]: committed tokens
    before row 0 (so row i sits at position lengths + i).  `prefill` picks the attention op; `sampling` says how
    tokens are chosen and `mode` what of it is in use: GREEDY (no row samples), SAMPLE (no row filters) or FILTER.
    edits: what requests change in the logits before (None: nobody anything), stop_ids int32 [S, K] is for it.
    """

    ids: Array
    positions: Array
    locations: Array
    page_table: Array
    lengths: Array
    kernels: Kernels = dataclasses.field(default=XLA, metadata={"static": True})
    prefill: bool = dataclasses.field(default=False, metadata={"static": True})
    sampling: SamplingRows | None = None
    mode: str = dataclasses.field(default=GREEDY, metadata={"static": True})
    edits: EditRows | None = None
    stop_ids: Array | None = None

    @property
    def takes_likeliest(self) -> bool:
        """Whether `choose` of `edited` logits is their argmax, for every request."""
        return (self.mode == GREEDY or self.sampling is None) and (self.edits is None or self.stop_ids is None)

    def edited(self, logits: Array, positions: Array, block_ids: Array | None = None) -> Array:
        """Logits [S, K, V] of tokens at `positions` int32 [S, K], as the requests want them changed.

        With block_ids int32 [S, K] row k counts the drafts up to its own as emitted.
        """
        if self.edits is None or self.stop_ids is None:
            return logits
        return edited_logits(logits, self.edits, self.stop_ids, positions, block_ids)

    def choose(self, logits: Array, positions: Array, ids: Array | None = None) -> Array:
        """The token int32 [S, K] that each request chooses at `positions` int32 [S, K] from float32 logits [S, K, V].

        Its noise depends on (seed, position, token) alone, so that a drafter that chooses with it often chooses what
        the target will.  `ids` int32 [S, K, V] names the candidates where they are not the whole vocabulary; the
        result then indexes them.
        """
        if self.mode == GREEDY or self.sampling is None:
            return first_largest(logits)
        return self.kernels.sample_tokens(logits, self.sampling, positions, self.mode == FILTER, ids)


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


def head_weight(params: Params) -> Array | Turned:
    """The output head [V, H]; whether it is the embedding is the target's decision."""
    return params.get("head", params["embed"])


def embed(params: Params, ids: Array, scale: float = 1.0) -> Array:
    """Rows [..., H] of the embedding table, × scale."""
    x = params["embed"][ids]
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def decoder_layer(
    config: TargetConfig, window: int | None, p: Params, then: Following, x: Array, y: Array, rows: Rows,
    rope: tuple[Array, Array], pool: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """One layer over x [S, B, H]: causal attention over the committed pages and the rows themselves, then SwiGLU.

    y: x after the layer's own norm.  Returns x, x after `then.norm`, and the layer's pool with KV written: every sum
    is normed next, and one op does both.  Under `jit` for its cache alone: equal layers are traced and lowered once,
    and the compiler inlines them again.
    """
    attn, eps = p["attn"], config.rms_norm_eps
    projected = project_qkv(attn, y, rows.kernels), attn.get("q_norm"), attn.get("k_norm"), eps, *rope
    out, pool = _attend(rows, pool, projected, window)
    x, y = project_out_norm(attn, out, x, Following(p["post_norm"], p["mlp"]["gate_up"]), eps, rows.kernels)
    return *swiglu_norm(p["mlp"], y, x, then, eps, rows.kernels), pool


def _attend(rows: Rows, pool: Array, projected: tuple[Any, ...], window: int | None) -> tuple[Array, Array]:
    """Causal attention [S, B, N, D] of `projected` = (qkv, norms, eps, cos, sin), and the pool written."""
    where = rows.page_table, rows.lengths
    if not rows.prefill:
        return rows.kernels.verify_attention(pool, *projected, rows.locations, *where, causal=True, window=window)
    q, kv, pool = rows.kernels.cache_write(pool, *projected, rows.locations)
    return rows.kernels.prefill_attention(q, kv, pool, *where, causal=True, window=window), pool


def decode_rows(params: Params, config: TargetConfig, rows: Rows, pool: Pool, taps: tuple[int, ...] = ()) -> Hidden:
    """Run the target over `rows`.  Layers are unrolled (a scan over stacked weights is far slower on GPU).

    Tap i is the hidden state after layer i, which for the last layer means after the final norm
    (Hugging Face's `hidden_states[i + 1]`).
    """
    x = embed(params, rows.ids)
    rope = rope_tables(config.rope, config.head_dim, rows.positions)
    y = rms_norm(x, params["layers"][0]["input_norm"], config.rms_norm_eps)
    written, after = [], []
    for i, (layer, then) in enumerate(zip(params["layers"], followers(params), strict=True)):
        x, y, layer_pool = decoder_layer(config, config.window(i), layer, then, x, y, rows, rope, pool[i])
        written.append(layer_pool)
        after.append(x)
    after[-1] = y
    captured = jnp.concatenate([after[i] for i in taps], axis=-1) if taps else y[..., :0]
    return Hidden(y, captured, tuple(written))
