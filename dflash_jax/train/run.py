"""A whole training run in one folder: data/, checkpoints/, metrics.jsonl, curves.png and draft/."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dflash_jax.config import read_draft
from dflash_jax.demo import demo_target_path
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.settings import EngineSettings
from dflash_jax.errors import UserError
from dflash_jax.params import Params
from dflash_jax.sharding import make_mesh
from dflash_jax.train.checkpoint import Checkpoints
from dflash_jax.train.curves import draw_curves
from dflash_jax.train.data import (
    Conversation,
    Part,
    batch_at,
    check_made_of,
    count_of,
    engine_writer,
    load_shards,
    shard_paths,
    stacked,
    write_shards,
)
from dflash_jax.train.export import export_draft
from dflash_jax.train.init import init_draft, like_target, read_params
from dflash_jax.train.prompts import Encode, Prompt, read_prompts
from dflash_jax.train.recipe import STARTS, Recipe
from dflash_jax.train.step import Trainer, TrainState, data_mesh, init_state
from dflash_jax.weights import TargetCheckpoint, load_target, open_target

log = logging.getLogger("dflash_jax")
Chats = Callable[[str], Encode]
"""A target's name → how its chat template renders messages."""
LEAST_SHARE = 8  # a round has an eighth of a writer's requests at least: fewer are rare, and each size is compiled
DATA, CHECKPOINTS, METRICS, CURVES, DRAFT = "data", "checkpoints", "metrics.jsonl", "curves.png", "draft"


def write_data(recipe: Recipe, folder: Path, chats: Chats, part: Part | None = None) -> None:
    """The recipe's shards, or those of one part of them: those that are missing."""
    data, given = recipe.data, given_prompts(recipe, chats)
    if not count_of(data, given):
        raise UserError("[data] asks for nothing: it needs conversations, prompts, or both")
    check_made_of(folder / DATA, _made_of(recipe))
    if all(path.exists() for path in shard_paths(data, folder / DATA, given, part)):
        return
    invented = len(data.user_ids) + data.max_user_tokens + len(data.turn_ids)
    longest = max(invented, *(len(p.tokens) for p in given)) if given else invented
    settings = EngineSettings(
        target_name(recipe), data.draft, max_model_len=longest + data.max_answer_tokens,
        max_running_requests=data.requests, min_decode_batch=max(1, data.requests // LEAST_SHARE), dtype="auto",
        progress=True,
    )  # fmt: skip
    write_shards(data, folder / DATA, engine_writer(Engine(settings), data.stop_ids), given, part)
    gc.collect()  # an engine holds itself in cycles, and training needs the memory of its pools


def given_prompts(recipe: Recipe, chats: Chats) -> list[Prompt]:
    """The prompts of the recipe's file, if it names one, that leave room for an answer to learn from."""
    if recipe.data.prompts is None:
        return []
    path, room = Path(recipe.data.prompts), recipe.train.length - recipe.data.min_answer_tokens
    found = read_prompts(path, chats(target_name(recipe)))
    fit = [prompt for prompt in found if len(prompt.tokens) <= room]
    if not fit:
        raise UserError(f"{path}: each of its {len(found)} prompts has more than {room} tokens, and [train] length is"
                        f" {recipe.train.length}")  # fmt: skip
    if len(fit) < len(found):
        log.warning("%s: %d of %d prompts have more than %d tokens and are left out, as [train] length is %d",
                    path, len(found) - len(fit), len(found), room, recipe.train.length)  # fmt: skip
    return fit


def _made_of(recipe: Recipe) -> dict[str, Any]:
    """What shards of one run agree on; there may be more conversations, other requests or another draft later."""
    found = {"target": recipe.target, **_without(dataclasses.asdict(recipe.data), "conversations", "requests", "draft")}
    if recipe.data.prompts is not None:
        found["prompts"] = _sha256(Path(recipe.data.prompts))
        found["length"] = recipe.train.length
    return found


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _without(table: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in keys}


def target_name(recipe: Recipe) -> str:
    return str(demo_target_path()) if recipe.target == "demo" else recipe.target


class Run:
    """Trainer, data and state of a run; `train` goes on from where the folder's checkpoints are."""

    def __init__(self, recipe: Recipe, folder: Path, devices: Sequence[Any] | None = None):
        self.recipe, self.folder = recipe, folder
        self.learn, self.held_out = load_shards(folder / DATA)
        opened: TargetCheckpoint = open_target(target_name(recipe))
        self.target = opened.config
        self.raw = recipe.draft.json(opened.config)
        self.config = recipe.train.config(opened.config, read_draft("the recipe's draft", self.raw, opened.config))
        params = load_target(opened, jnp.dtype(self.config.dtype), make_mesh(), progress=True)
        mesh = data_mesh(devices)
        self.trainer = Trainer(self.config, params, mesh)
        self.state = init_state(self.config, self._first(params), mesh)

    def _first(self, target: Params) -> Params:
        """The draft that training begins with."""
        start, config = self.recipe.train.start, self.config.draft
        self.recipe.train.check_start()
        if start not in STARTS:
            return read_params(Path(start), config, self.target)
        first = init_draft(config, jax.random.key(self.config.seed))
        return like_target(config, target, first) if start == "target" else first

    def train(self, stop_at: int | None = None) -> TrainState:
        """Steps up to the recipe's, or `stop_at`; then the draft is exported."""
        plan, end = self.recipe.train, min(stop_at or self.config.steps, self.config.steps)
        with Checkpoints(self.folder / CHECKPOINTS, self._identity()) as kept:
            if kept.newest is not None:
                self.state = kept.restore(self.state)
            first = int(self.state.step)
            self._forget_metrics(first)
            with tqdm(total=end, initial=first, desc="training", unit="step", disable=None) as bar:
                for step in range(first, end):
                    self._step(step, bar, last=step + 1 == end)
                    if (step + 1) % plan.save_every == 0 or step + 1 == end:
                        kept.save(self.state)
                        draw_curves(self.folder / METRICS, self.folder / CURVES)
        export_draft(self.folder / DRAFT, self.raw, self.target, jax.device_get(self.state.params))
        return self.state

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with; how often to log and save may change."""
        found: dict[str, Any] = dataclasses.asdict(self.recipe)
        found["texts"] = [len(self.learn), len(self.held_out)]
        found["train"] = _without(found["train"], "log_every", "save_every")
        found["data"] = _without(found["data"], "prompts", "requests", "draft")  # the texts are what counts
        return json.loads(json.dumps(found))

    def _step(self, step: int, bar: Any, last: bool) -> None:
        plan = self.recipe.train
        batch = batch_at(step, self.learn, plan.parts, plan.sequences, plan.length, plan.seed)
        self.state, measured = self.trainer.step(self.state, batch)
        bar.update()
        if (step + 1) % plan.log_every == 0 or last:
            found = plainly(measured)
            bar.set_postfix(loss=f"{found['loss']:.3f}", accept=f"{found['accept_length']:.2f}")
            self._log({"step": step + 1, **found})
        if self.held_out and ((step + 1) % plan.save_every == 0 or last):
            self._log({"step": step + 1, "held_out": self.measure(self.held_out)})

    def measure(self, texts: Sequence[Conversation]) -> dict[str, Any]:
        """Mean metrics of texts that are not learnt from: of as many as fill whole batches, at most 16."""
        plan = self.recipe.train
        size = plan.sequences
        many = [*texts, *texts[: -len(texts) % size]] if len(texts) >= size else (list(texts) * size)[:size]
        found = [
            self.trainer.held_out(self.state.params, stacked(many[i : i + size], plan.length, (size,)))
            for i in range(0, min(len(many), 16 * size), size)
        ]
        return jax.tree.map(lambda *x: np.mean(x, axis=0).tolist(), *map(plainly, found))

    def _log(self, line: dict[str, Any]) -> None:
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _forget_metrics(self, step: int) -> None:
        """Lines of steps after the checkpoint will come again."""
        path = self.folder / METRICS
        if path.exists():
            lines = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= step]
            path.write_text("".join(lines))


def plainly(measured: dict[str, Any]) -> dict[str, Any]:
    """Metrics as numbers and lists."""
    return {name: np.asarray(value).tolist() for name, value in jax.device_get(measured).items()}


def check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, and a run needs a folder")


__all__ = ["Run", "check_folder", "plainly", "write_data"]
