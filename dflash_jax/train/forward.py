"""The two passes of a training step: the frozen target over whole sequences, and the draft over many blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.models import FAMILIES, Hidden, Rows, embed
from dflash_jax.models.dflash import draft_rows, inject_context, with_injection
from dflash_jax.params import Params
from dflash_jax.train.blocks import Blocks
from dflash_jax.train.dense import DENSE


def target_hidden(params: Params, config: TargetConfig, tokens: Array, taps: tuple[int, ...]) -> Hidden:
    """Taps [S, T, K·H] and last hidden states [S, T, H] of the target at every position of tokens int32 [S, T],
    without a cache and constant."""
    nothing = (None,) * config.num_layers
    hidden = FAMILIES[config.family].forward(params, config, _from_zero(tokens), nothing, taps)
    return hidden._replace(last=jax.lax.stop_gradient(hidden.last), taps=jax.lax.stop_gradient(hidden.taps))


def target_taps(params: Params, config: TargetConfig, tokens: Array, taps: tuple[int, ...]) -> Array:
    """Taps [S, T, K·H] alone."""
    return target_hidden(params, config, tokens, taps).taps


def draft_hidden(params: Params, config: DraftConfig, target: Params, taps: Array, blocks: Blocks) -> Array:
    """Hidden states [S, A, B, H] of blocks, each over the context strictly before its anchor: taps [S, T, K·H].

    `params` are the draft's as they are trained, without `inject`; `target` gives its embedding table.
    """
    context = _context(params, config, taps)
    rows = _rows(_flat(blocks.ids), _flat(blocks.positions), blocks.anchors.reshape(-1))
    embedded = jax.lax.stop_gradient(embed(target, rows.ids, config.input_embedding_scale))
    hidden = draft_rows(params, config, embedded, rows, context)
    return hidden.reshape(*blocks.ids.shape, -1)


def _context(params: Params, config: DraftConfig, taps: Array) -> tuple[Array, ...]:
    """Keys and values [S, T, 2, G, D] of the context for every layer: each tap row at its own position."""
    rows, nothing = _from_zero(taps[..., 0]), (None,) * config.num_layers
    injected = with_injection(params, config)
    return inject_context(injected, config, taps, rows.positions, rows.locations, nothing, DENSE)  # type: ignore[arg-type]


def _from_zero(ids: Array) -> Rows:
    """Rows [S, T] of whole sequences."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
    return _rows(ids, positions, jnp.zeros(ids.shape[0], jnp.int32))


def _rows(ids: Array, positions: Array, lengths: Array) -> Rows:
    """Rows that live in no page: what says where they would is there for its shape alone."""
    return Rows(ids, positions, positions, lengths[:, None], lengths, DENSE)


def _flat(x: Array) -> Array:
    """[S, A, B] → [S·A, B]."""
    return x.reshape(-1, x.shape[-1])
