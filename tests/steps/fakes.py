"""Drafters whose acceptance can be worked out by hand, and a toy pair to run them on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from dflash_jax.config import ConvConfig, DraftConfig, RopeConfig, SelectorConfig, TargetConfig
from dflash_jax.drafters import Capabilities, DFlashDrafter, NoDrafter, Weights
from dflash_jax.models import FAMILIES, Rows
from dflash_jax.models.dflash import draft_specs, with_injection
from dflash_jax.params import ParamSpec, build
from dflash_jax.steps import StepConfig
from steps.lab import Lab, Request, Run, solo

BLOCK, PAGE, SEED = 8, 8, 18
TEXT = 256  # positions a script covers


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter:
    """Proposes the true text for `right` tokens of each block and wrong ones after that; absorbs like `inner`.

    weights.draft holds `script` int32 [P, TEXT], the text by absolute position of the request whose first page is p;
    `right` int32 []; and `inner`, the inner drafter's parameters.  The cache holds `log` int32 [P·C], the token
    absorbed at each location (−1: none), and `inner`.
    """

    inner: DFlashDrafter
    block: int = BLOCK
    capabilities = Capabilities(needs_hidden=True)

    @property
    def max_block(self) -> int:
        return self.block

    @property
    def mask_id(self) -> int:
        return self.inner.mask_id

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    def page_bytes(self, page_size: int, dtype: Any) -> int:
        return self.inner.page_bytes(page_size, dtype) + 4 * page_size

    def init_cache(self, num_pages: int, page_size: int, dtype: Any, mesh: Mesh) -> Any:
        log = jnp.full(num_pages * page_size, -1, jnp.int32)
        return {"log": log, "inner": self.inner.init_cache(num_pages, page_size, dtype, mesh)}

    def draft(self, weights: Weights, cache: Any, rows: Rows) -> Array:
        script, right = weights.draft["script"], weights.draft["right"]
        truth = script[rows.page_table[:, :1], jnp.minimum(rows.positions[:, 1:], TEXT - 1)]
        wrong = (truth + 1) % self.inner.config.vocab_size
        return jnp.where(jnp.arange(1, rows.ids.shape[1])[None] <= right, truth, wrong)

    def absorb(self, weights: Weights, cache: Any, taps: Array, rows: Rows) -> Any:
        inner = self.inner.absorb(Weights(weights.target, weights.draft["inner"]), cache["inner"], taps, rows)
        return {"log": cache["log"].at[rows.locations].set(rows.ids), "inner": inner}


# -- the toy pair --------------------------------------------------------------------------------------------------

ROPE = RopeConfig(theta=1e4)
TARGET = TargetConfig(
    family="qwen3", vocab_size=29, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, rms_norm_eps=1e-6, rope=ROPE, max_position=TEXT, tied=False,
)  # fmt: skip
MASK = 13  # a token that the toy target says itself (CASE 15)
DRAFT = DraftConfig(
    version=2, vocab_size=29, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=4,
    head_dim=16, rms_norm_eps=1e-6, rope=ROPE, taps=(1, 0), block_size=BLOCK, mask_token_id=MASK,
    windows=(None, 6), causal=(False, True), conv=ConvConfig(2, 8), selector=SelectorConfig(4, 4),
)  # fmt: skip


def random_tree(specs: Any, seed: int) -> Any:
    """Parameters of the declared shapes by numpy, which compiles nothing."""
    rng = np.random.default_rng(seed)

    def leaf(path: str, spec: ParamSpec) -> Array:
        if spec.init == "ones":
            return jnp.asarray(rng.uniform(0.7, 1.3, spec.shape), jnp.float32)
        scale = 1.0 if path in ("embed", "head") else 2 * spec.shape[0] ** -0.5
        return jnp.asarray(rng.normal(0, scale, spec.shape), jnp.float32)

    return build(specs, leaf)


@functools.cache
def toy_weights() -> Weights:
    """Random target and draft, float32."""
    return Weights(
        random_tree(FAMILIES["qwen3"].specs(TARGET), seed=SEED),
        with_injection(random_tree(draft_specs(DRAFT), seed=SEED + 1), DRAFT),
    )


@functools.cache
def plain_lab() -> Lab:
    """The toy target without a draft."""
    return Lab(StepConfig(TARGET, NoDrafter(), PAGE), Weights(toy_weights().target, None), 4, 32, 6, TEXT // PAGE)


@functools.cache
def dflash_lab() -> Lab:
    """The toy target with its (untrained) draft."""
    return Lab(StepConfig(TARGET, DFlashDrafter(DRAFT), PAGE), toy_weights(), 4, 32, 6, TEXT // PAGE)


@functools.cache
def scripted_lab() -> Lab:
    """The toy target with a scripted drafter; `script` gives its weights."""
    drafter = ScriptedDrafter(DFlashDrafter(DRAFT))
    return Lab(StepConfig(TARGET, drafter, PAGE), toy_weights(), 4, 32, 6, TEXT // PAGE)


@functools.cache
def _truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(solo(plain_lab(), prompt, TEXT - len(prompt)).tokens)


def truth(prompt: Sequence[int], new: int = TEXT) -> list[int]:
    """What the toy target says after `prompt`, by plain decoding."""
    return list(_truth(tuple(prompt)))[:new]


def script(lab: Lab, right: int, requests: Sequence[Request], target: Any = None) -> Weights:
    """Weights that tell the drafter the texts of the requests, and to be right for `right` tokens of each block."""
    texts = np.zeros((lab.num_pages, TEXT), np.int32)
    for request in requests:
        table = request.table or lab.table(request.slot)
        texts[table[0]] = [*request.prompt, *truth(request.prompt)][:TEXT]
    drafting = {"script": jnp.asarray(texts), "right": jnp.int32(right), "inner": toy_weights().draft}
    return Weights(toy_weights().target if target is None else target, drafting)


def scripted(right: int, requests: Sequence[Request], target: Any = None) -> Run:
    """The requests with their prompts in the pages, before their first round."""
    lab = scripted_lab()
    weights = script(lab, right, requests, target)
    return Run(dataclasses.replace(lab, weights=weights), requests).prefill()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(100 * seed + length).integers(0, TARGET.vocab_size, length).tolist()
