"""What a GPU's clock and power are while whole rounds run, and while a product of many rows does.

    python benchmarks/gpu_power.py --preset qwen3-8b --requests 1 --requests 8 --requests 32 --context 1000

A GPU at its power limit lowers its clock until it is within it.  What that costs shows in the same work on zeros, which
takes less power: rounds of a pair whose layers' weights are zero (its embedding and heads are random, so that drafts
are rejected as they are with random layers), and a product of as many rows as 32 requests have.  How random weights are
spread matters, too: rounds also run on what vLLM takes for dummy weights, all of them uniform within ±0.001.
first_ms: of the first train of rounds, when the chip comes from rest; ms: for as long as it is watched.  Each train
begins with `context` committed tokens anew.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from record import record
from round_profile import train

from dflash_jax.benchmark.drawn import redrawn
from dflash_jax.benchmark.round_report import make_timer
from dflash_jax.benchmark.synthetic import random_pair
from dflash_jax.engine.build import Loaded
from dflash_jax.ops import select
from dflash_jax.params import normal

ASKED = ("clocks.sm", "power.draw.instant", "clocks_event_reasons.sw_power_cap")
EVERY_MS, TRAIN, SECONDS = 50, 20, 2.0
UNIFORM = 1e-3
ROWS, WEIGHTS = 512, 4  # the weights take turns, so that none stays in the chip's cache


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--preset", default="qwen3-8b")
    p.add_argument("--requests", type=int, action="append")
    p.add_argument("--context", type=int, default=1000)
    p.add_argument("--name", help="record the figures under benchmarks/results")
    args = p.parse_args()
    pair = random_pair(args.preset, "auto", True)
    limits = queried("power.limit", "clocks.max.sm")
    print(f"at most {limits['power.limit']:.0f} W and {limits['clocks.max.sm']:.0f} MHz")
    kernels, block, results = select("auto", jax.default_backend()), pair.drafter.max_block, []
    weights = {"normal weights": lambda pair: pair, "zeros for layers": without_layers, "uniform weights": uniform}
    for kind, made in weights.items():
        loaded = made(pair)
        for requests in args.requests or [1, 8, 32]:
            timer = make_timer(loaded, kernels, requests, args.context, block)
            name = f"round, {requests} x {block} rows over {args.context}, {kind}"
            results.append(watched(name, timer.whole, timer.rewind))
            del timer  # the pools, before others are made
        del loaded
    k, n = pair.config.hidden_size, 2 * pair.config.intermediate_size
    for kind in ("normal", "zeros"):
        found = watched(f"{ROWS} rows x {k} x {n}, {kind}", product(k, n, kind), of=WEIGHTS)
        results.append({**found, "TFLOP/s": 2 * ROWS * k * n / found["ms"] / 1e9})
    for found in results:
        print(", ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
                        for key, value in found.items()))  # fmt: skip
    if args.name:
        record(args.name, {"limits": limits, "results": results})


def without_layers(pair: Loaded) -> Loaded:
    """The pair with zeros for its layers' weights."""
    weights = pair.weights
    target, draft = ({**params, "layers": jax.tree.map(jnp.zeros_like, params["layers"])}
                     for params in (weights.target, weights.draft))  # fmt: skip
    return dataclasses.replace(pair, weights=weights._replace(target=target, draft=draft))


def uniform(pair: Loaded) -> Loaded:
    """The pair with all weights, also of norms, drawn anew within ±UNIFORM."""
    return dataclasses.replace(pair, weights=redrawn(pair.weights, _uniform))


@jax.jit
def _uniform(key: Array, x: Array) -> Array:
    return jax.random.uniform(key, x.shape, jnp.float32, -UNIFORM, UNIFORM).astype(x.dtype)


def product(k: int, n: int, kind: str) -> Callable[[], Any]:
    """`WEIGHTS` products of normal rows with normal weights, or of zeros with zeros."""

    @functools.partial(jax.jit, static_argnums=1)
    def draw(i: int, shape: tuple[int, int]) -> Array:
        if kind == "zeros":
            return jnp.zeros(shape, jnp.bfloat16)
        return normal(jax.random.key(i), shape, jnp.bfloat16)

    rows, weights = draw(WEIGHTS, (ROWS, k)), [draw(i, (k, n)) for i in range(WEIGHTS)]

    @jax.jit
    def run(rows: Array, weights: list[Array]) -> list[Array]:
        found = []
        for w in weights:
            rows, y = jax.lax.optimization_barrier((rows, rows @ w))  # one after the other
            found.append(y[:1])
        return found

    return lambda: run(rows, weights)


def watched(
    name: str, launch: Callable[[], Any], begin: Callable[[], None] = lambda: None, of: int = 1
) -> dict[str, Any]:
    """Milliseconds, clock and power of `launch`, which does its work `of` times; `begin` comes before each train."""
    jax.block_until_ready(launch())
    times_ms: list[float] = []
    with sampled() as samples:
        end_s = time.perf_counter() + SECONDS
        while time.perf_counter() < end_s:
            begin()
            times_ms.append(train(launch, TRAIN) / of)
    if not samples:
        raise SystemExit(f"nvidia-smi says nothing of {', '.join(ASKED)}")
    settled = samples[len(samples) // 2 :]
    clock, power, capped = (statistics.median(column) for column in zip(*settled, strict=True))
    return {
        "what": name, "ms": statistics.median(times_ms), "first_ms": times_ms[0], "clock_mhz": clock, "power_w": power,
        "power_limited": bool(capped),
    }  # fmt: skip


@contextlib.contextmanager
def sampled() -> Iterator[list[tuple[float, ...]]]:
    """Clock in MHz, power in watts and whether power limits it, every 50 ms while the body runs."""
    samples: list[tuple[float, ...]] = []

    def read(lines: Iterable[str]) -> None:
        for line in lines:
            with contextlib.suppress(ValueError):  # a figure that this GPU or driver does not have
                samples.append(parsed(line))

    with subprocess.Popen([*asking(*ASKED), "-lms", str(EVERY_MS)], stdout=subprocess.PIPE, text=True) as process:
        reader = threading.Thread(target=read, args=(process.stdout or (),))
        reader.start()
        try:
            yield samples
        finally:
            process.terminate()
            reader.join()


def parsed(line: str) -> tuple[float, ...]:
    clock, power, capped = (word.strip() for word in line.split(","))
    return float(clock), float(power), float(capped == "Active")


def queried(*names: str) -> dict[str, float]:
    words = subprocess.run(asking(*names), check=True, capture_output=True, text=True).stdout.split(",")
    return {name: float(word) for name, word in zip(names, words, strict=True)}


def asking(*names: str) -> list[str]:
    return ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]


if __name__ == "__main__":
    main()
