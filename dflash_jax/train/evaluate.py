"""How many tokens a draft is good for: prompts it never saw, decoded for real by the engine."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.drafters.token_map import map_size
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.request import Request
from dflash_jax.engine.settings import EngineSettings
from dflash_jax.errors import UserError
from dflash_jax.sampling import SamplingParams
from dflash_jax.train.data import answered, load_shards
from dflash_jax.train.prompts import Prompt, read_prompts
from dflash_jax.train.recipe import Recipe
from dflash_jax.train.run import DATA, DRAFT, Chats, given_prompts, target_name

TEMPERATURES = (0.0, 1.0)
HELD_OUT, ALL = "held_out", "all"
REQUESTS = 32  # decoded at once; acceptance does not depend on it


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """draft: a folder, a hub id or another drafter, None for the run's own; prompts: a JSONL file, None for what was
    held out; of more than `count` prompts, `count` are taken evenly."""

    draft: str | None = None
    prompts: Path | None = None
    count: int = 100
    max_new_tokens: int = 96

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f"--count must be at least 1, not {self.count}")
        if self.max_new_tokens < 2:
            raise UserError(f"--max-new-tokens must be at least 2, not {self.max_new_tokens}: the first is in no round")


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Of the responses of one category at one temperature: the mean of their mean acceptances, their number, tokens.

    A response that ended with its first token has no round and is not counted.
    """

    category: str
    temperature: float
    acceptance: float | None
    responses: int
    tokens: int


def evaluate(recipe: Recipe, folder: Path, config: EvalConfig, chats: Chats) -> list[Acceptance]:
    """Decode, and keep what was found in the run's folder as JSON."""
    draft = config.draft or str(folder / DRAFT)
    if config.draft is None and not (folder / DRAFT).is_dir():
        raise UserError(f"{folder} has no draft yet: train one, or name another with --draft")
    prompts = evenly(eval_prompts(recipe, folder, config, chats), config.count)
    longest = max(len(p.tokens) for p in prompts) + config.max_new_tokens
    engine = Engine(EngineSettings(  # whole blocks: narrower ones would be faster at times, and accept less
        target_name(recipe), draft, max_model_len=longest, max_running_requests=min(REQUESTS, 2 * len(prompts)),
        speculation="always", progress=True,
    ))  # fmt: skip
    stop_ids = tuple(dict.fromkeys((*engine.loaded.config.eos_token_ids, *recipe.data.stop_ids)))
    found = measure(engine, prompts, stop_ids, config.max_new_tokens)
    about = {"target": recipe.target, "draft": draft, "block_size": engine.runner.block_size,
             "dtype": str(engine.loaded.dtype), "prompts": str(config.prompts or HELD_OUT),
             "max_new_tokens": config.max_new_tokens,
             "token_map": map_size(engine.loaded.weights.draft)}  # fmt: skip
    keep(folder / file_name(config), about, found)
    return found


def eval_prompts(recipe: Recipe, folder: Path, config: EvalConfig, chats: Chats) -> list[Prompt]:
    """Those of the file, or the prompts of what was held out, each with its category."""
    if config.prompts is not None:
        found = read_prompts(config.prompts, chats(target_name(recipe)))
        return [dataclasses.replace(p, category=p.category or HELD_OUT) for p in found]
    held = dict.fromkeys(tuple(np.asarray(c.tokens[: c.start]).tolist()) for c in load_shards(folder / DATA)[1])
    if not held:
        raise UserError(f"{folder / DATA} holds nothing out: name a file of prompts with --prompts")
    categories = {p.tokens: p.category for p in given_prompts(recipe, chats)}
    return [Prompt(tokens, categories.get(tokens) or HELD_OUT, True) for tokens in held]


def evenly(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """At most `count` of them, from all places."""
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def measure(
    engine: Engine, prompts: Sequence[Prompt], stop_ids: Sequence[int], max_new_tokens: int
) -> list[Acceptance]:
    """Each prompt answered once at each temperature; by category in the order of the prompts, then of all."""
    asked = [(p, heat, i) for heat in TEMPERATURES for i, p in enumerate(prompts)]
    params = [SamplingParams(max_new_tokens=max_new_tokens, temperature=heat, seed=i) for _, heat, i in asked]
    requests = answered(engine, [list(p.tokens) for p, _, _ in asked], params, stop_ids)
    categories = list(dict.fromkeys(p.category or HELD_OUT for p in prompts))
    found = []
    for category in [*categories, *[ALL] * (len(categories) > 1)]:
        for heat in TEMPERATURES:
            own = [r for (p, t, _), r in zip(asked, requests, strict=True)
                   if t == heat and category in (p.category or HELD_OUT, ALL)]  # fmt: skip
            found.append(summed(category, heat, own))
    return found


def summed(category: str, temperature: float, requests: Sequence[Request]) -> Acceptance:
    means = [mean for request in requests if (mean := mean_accept_length(request)) is not None]
    tokens = sum(len(request.output_ids) for request in requests if request.accept_lengths)
    return Acceptance(category, temperature, sum(means) / len(means) if means else None, len(means), tokens)


def mean_accept_length(request: Request) -> float | None:
    """Tokens per round, as in `RequestOutput`: the first token is in no round."""
    rounds = request.accept_lengths
    return sum(rounds) / len(rounds) if rounds else None


# -- what is shown and kept ------------------------------------------------------------------------------------------


def table(found: Sequence[Acceptance]) -> str:
    """A line for each category and temperature."""
    width = max(len("category"), *(len(row.category) for row in found))
    lines = [f"{'category':{width}}    T  acceptance  responses   tokens"]
    for row in found:
        mean = "-" if row.acceptance is None else f"{row.acceptance:.2f}"
        lines.append(f"{row.category:{width}}  {row.temperature:3.1f}  {mean:>10}  {row.responses:9}  {row.tokens:7}")
    return "\n".join(lines)


def file_name(config: EvalConfig) -> str:
    """eval.json for the run's own draft and held-out prompts; others are told apart by name."""
    parts = [Path(config.draft).name if config.draft else "", config.prompts.stem if config.prompts else ""]
    return "-".join(["eval", *(re.sub(r"[^\w.]+", "_", part) for part in parts if part)]) + ".json"


def keep(path: Path, about: dict[str, Any], found: Sequence[Acceptance]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**about, "acceptance": [dataclasses.asdict(row) for row in found]}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
