"""A slow reader of the definition: no cache, no batch, no draft; the whole text through the target for each token."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import LLM, SamplingParams
from dflash_jax.engine.packing import sampling_rows
from dflash_jax.engine.protocol import Grammar
from dflash_jax.models import FAMILIES, Rows, head_weight
from dflash_jax.ops import XLA
from dflash_jax.ops.reference.sample import gumbel

LONGEST = 64  # tokens of a forward pass


@dataclass
class Answer:
    """What a request should give; logprobs: of each token its raw log-probability, rank, and those of all tokens."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    logprobs: list[tuple[float, int, np.ndarray]] = field(default_factory=list)


class Oracle:
    def __init__(self, llm: LLM):
        self.config, self.params = llm.engine.loaded.config, llm.engine.loaded.weights.target
        self.eos = llm.eos_token_ids
        self._logits = jax.jit(functools.partial(self._forward, self.params))

    def _forward(self, params: object, ids: jax.Array) -> jax.Array:
        """float32 logits [T, V] after each of T tokens."""
        at = jnp.arange(ids.shape[0], dtype=jnp.int32)[None]
        empty = jnp.zeros((1, 1), jnp.int32)
        rows = Rows(ids[None], at, jnp.zeros_like(at), empty, jnp.zeros(1, jnp.int32))
        shape = (1, 2, self.config.num_kv_heads, ids.shape[0], self.config.head_dim)
        pool = (jnp.zeros(shape, jnp.float32),) * self.config.num_layers
        hidden = FAMILIES[self.config.family].forward(params, self.config, rows, pool)
        return XLA.head_logits(hidden.last, head_weight(params))[0]

    def logits(self, ids: list[int]) -> np.ndarray:
        """[T, V] of the T tokens."""
        padded = jnp.asarray([*ids, *[0] * (LONGEST - len(ids))], jnp.int32)
        return np.asarray(self._logits(padded))[: len(ids)]

    def answer(self, prompt: list[int], asked: SamplingParams, grammar: Grammar | None = None) -> Answer:
        """`grammar` at its beginning; it has seen the answer afterwards."""
        out = Answer()
        stops = {*asked.stop_token_ids, *(() if asked.ignore_eos else self.eos)}
        while len(out.token_ids) < asked.max_new_tokens:
            ids = [*prompt, *out.token_ids]
            raw = self.logits(ids)[-1]
            changed = self._changed(raw, prompt, out.token_ids, asked, stops)
            if grammar:
                bits = np.unpackbits(grammar.masks(())[0].astype("<u4").view(np.uint8), bitorder="little")
                changed[bits[: changed.size] == 0] = -np.inf
            token = self._choose(changed, asked, len(ids))
            out.token_ids.append(token)
            if grammar:
                grammar.advance([token])
            values = log_softmax(raw)
            out.logprobs.append((values[token], int((values >= values[token]).sum()), values))
            if token in stops:
                out.finish_reason = "stop"
                break
        return out

    def _changed(
        self, raw: np.ndarray, prompt: list[int], output: list[int], asked: SamplingParams, stops: set[int]
    ) -> np.ndarray:
        x = raw.copy()
        forbidden = {*asked.bad_token_ids, *(stops if len(output) < asked.min_tokens else ())}
        if asked.allowed_token_ids is not None:
            forbidden |= set(range(x.size)) - set(asked.allowed_token_ids)
        x[list(forbidden)] = -np.inf
        for token, bias in (asked.logit_bias or {}).items():
            x[token] += np.float32(bias)
        for token in {*prompt, *output}:
            penalty = np.float32(asked.repetition_penalty)
            x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        for token in set(output):
            x[token] -= np.float32(asked.frequency_penalty) * output.count(token) + np.float32(asked.presence_penalty)
        return x

    def _choose(self, logits: np.ndarray, asked: SamplingParams, position: int) -> int:
        if asked.temperature == 0:
            return int(logits.argmax())
        z = logits / np.float32(asked.temperature)
        p = np.exp(z.astype(np.float64) - z.max())
        p[p < asked.min_p * (1 - 1e-9)] = 0
        if asked.top_k > 0:
            p[p < np.sort(p)[::-1][min(asked.top_k, p.size) - 1]] = 0
        order = np.argsort(-p, kind="stable")
        above = (np.cumsum(p[order]) - p[order]) / p.sum()
        p[order[above >= asked.top_p]] = 0
        seed = jnp.asarray(sampling_rows([asked]).seed)
        noise = gumbel(seed, jnp.full((1, 1), position, jnp.int32), jnp.arange(z.size, dtype=jnp.int32)[None, None])
        return int(np.where(p > 0, z + np.asarray(noise)[0, 0], -np.inf).argmax())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    z = logits.astype(np.float64) - logits.max()
    return z - np.log(np.exp(z).sum())
