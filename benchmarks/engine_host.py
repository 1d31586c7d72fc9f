"""Host work per round with 32 running requests: everything but the device.

    python benchmarks/engine_host.py --target DIR --draft DIR --name engine-host-cpu

Takes a tiny pair (tests/data/pairs/x-v2-one-layer).  Rounds grow page tables; a callback sees every request's tokens.
Once with the model and once with a device that computes nothing: the compiled round is then one of the same arguments
and results, in which every request gets (up to) four tokens.  Processor time of the stepping thread for a step, in
microseconds, without waiting for the device:

- host: all of it.  With the model on CPU, that holds XLA's own work to start a round, and caches are cold.
- books: the part outside of the runner (scheduler, pages, callbacks, metrics).
- launch: the calls into JAX.  read: conversion of the results, once they have come.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
from record import record

from dflash_jax import Engine, EngineSettings, SamplingParams
from dflash_jax.engine.build import load
from dflash_jax.ops import RUNNING as RUNNING_ON
from dflash_jax.steps.compiled import COMMIT
from dflash_jax.steps.state_step import StateStep

RUNNING = 32
KEPT_ROUNDS = 200


class Timed:
    """Adds up processor time of the calls to a runner."""

    def __init__(self, engine: Engine):
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        for name in ("admit", "extend", "prefill", "decode", "finish"):
            setattr(engine.runner, name, self._timed(name, getattr(engine.runner, name)))

    def _timed(self, name: str, call: Any) -> Any:
        def timed(*args: Any, **options: Any) -> Any:
            start_s = time.thread_time()
            made = call(*args, **options)
            self.spent_s["launch"] += time.thread_time() - start_s
            if name in ("prefill", "decode"):
                made = Read(made, self)
            return made

        return timed

    def take(self) -> dict[str, float]:
        spent, self.spent_s = dict(self.spent_s), defaultdict(float)
        return spent


class Read:
    """A pending result that tells what reading it takes once it has come."""

    def __init__(self, pending: Any, timed: Timed):
        self._pending, self._timed = pending, timed

    def result(self) -> Any:
        start_s = time.thread_time()
        self._pending.packed.block_until_ready()
        ready_s = time.thread_time()
        rows = self._pending.result()
        self._timed.spent_s["wait"] += ready_s - start_s
        self._timed.spent_s["read"] += time.thread_time() - ready_s
        return rows


def rounds(engine: Engine, prompts: int) -> list[dict[str, float]]:
    """Seconds of each step in which RUNNING requests had a round."""
    vocab, longest = engine.loaded.config.vocab_size, engine.max_model_len
    for i in range(prompts):
        prompt = [(i * 7 + j * 13) % vocab for j in range(40)]
        params = SamplingParams(max_new_tokens=longest - 40, ignore_eos=True)
        engine.add_request(prompt, params, on_tokens=lambda request, tokens: False)
    timed, kept = Timed(engine), []
    while len(kept) < KEPT_ROUNDS and engine.has_work:
        start_s = time.thread_time()
        updates = engine.step()
        spent = timed.take()
        host_s = time.thread_time() - start_s - spent.get("wait", 0.0)
        if len(updates) == RUNNING and engine.metrics().num_requests_running == RUNNING:
            launch_s, read_s = spent.get("launch", 0.0), spent.get("read", 0.0)
            kept.append({"host": host_s, "launch": launch_s, "read": read_s, "books": host_s - launch_s - read_s})
    return kept


def without_device(engine: Engine) -> None:
    """The round computes nothing: its state passes through, and four tokens come for every request."""

    def null_round(block: int, weights: Any, state: Any, slots: jax.Array, needs: Any = None) -> tuple[Any, jax.Array]:
        row = jnp.asarray([min(4, block), RUNNING_ON, *[7] * block], jnp.int32)
        return state, jnp.broadcast_to(row, (slots.shape[0], block + 2)) + 0 * slots[:, None]

    jit = functools.partial(jax.jit, static_argnums=1, donate_argnums=0, static_argnames="needs")
    engine.runner.steps.decode_round = StateStep(null_round, COMMIT, jit)


def summary(times: list[dict[str, float]]) -> dict[str, Any]:
    values: dict[str, Any] = {"rounds": len(times)}
    for part in ("host", "books", "launch", "read"):
        found = sorted(one[part] * 1e6 for one in times)
        low, high = found[len(found) // 10], found[len(found) * 9 // 10]
        values[part] = {"median_us": statistics.median(found), "p10_us": low, "p90_us": high}
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--name", default="engine-host-cpu")
    args = parser.parse_args()
    settings = EngineSettings(
        args.target, args.draft, dtype="float32", max_running_requests=RUNNING, max_model_len=2048,
        speculation="always", chunked_prefill_size=64,
    )  # fmt: skip
    values: dict[str, Any] = {"running": RUNNING}
    loaded = load(settings)
    for device in ("model", "none"):
        engine = Engine(settings, loaded)
        if device == "none":
            without_device(engine)
        values[device] = summary(rounds(engine, prompts=2 * RUNNING))
        print(device, json.dumps(values[device]), flush=True)
    print("written:", record(args.name, values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
