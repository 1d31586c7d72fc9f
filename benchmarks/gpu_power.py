"""What a GPU's clock and power are while whole rounds run, and while a product of many rows does.

    python benchmarks/gpu_power.py --preset qwen3-8b --requests 1 --requests 8 --requests 32 --context 1000

A GPU at its power limit lowers its clock until it is within it.  What that costs shows in a product of a weight of
zeros, which takes little power for the same work: the rows are those of 32 requests, the weight is gate and up.
first: of the first train of rounds, when the chip comes from rest; then for as long as it is watched.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from record import record

from dflash_jax.benchmark.round_report import make_timer
from dflash_jax.benchmark.synthetic import random_pair
from dflash_jax.ops import select

ASKED = ("clocks.sm", "power.draw.instant", "clocks_event_reasons.sw_power_cap")
EVERY_MS, TRAIN, SECONDS = 50, 20, 2.0
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
    results = []
    for requests in args.requests or [1, 8, 32]:
        kernels = select("auto", jax.default_backend())
        timer = make_timer(pair, kernels, requests, args.context, pair.drafter.max_block)
        results.append(watched(f"round, {requests} x {pair.drafter.max_block} rows over {args.context}", timer.whole))
    gate_up = pair.weights.target["layers"][0]["mlp"]["gate_up"]
    k, n = gate_up.shape[0], gate_up.size // gate_up.shape[0]
    for kind in ("normal", "zeros"):
        found = watched(f"{ROWS} rows x {k} x {n}, weights {kind}", product(k, n, kind), of=WEIGHTS)
        results.append({**found, "TFLOP/s": 2 * ROWS * k * n / found["ms"] / 1e9})
    for found in results:
        print(", ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
                        for key, value in found.items()))  # fmt: skip
    if args.name:
        record(args.name, {"limits": limits, "results": results})


def product(k: int, n: int, kind: str) -> Callable[[], Any]:
    """`WEIGHTS` products of normal rows, or of nothing but zeros."""
    scale = 0.0 if kind == "zeros" else 1.0
    draw = jax.jit(lambda i, shape: scale * jax.random.normal(jax.random.key(i), shape, jnp.bfloat16), static_argnums=1)
    rows, weights = draw(WEIGHTS, (ROWS, k)), [draw(i, (k, n)) for i in range(WEIGHTS)]

    @jax.jit
    def run(rows: Array, weights: list[Array]) -> list[Array]:
        found = []
        for w in weights:
            rows, y = jax.lax.optimization_barrier((rows, rows @ w))  # one after the other
            found.append(y[:1])
        return found

    return lambda: run(rows, weights)


def watched(name: str, launch: Callable[[], Any], of: int = 1) -> dict[str, Any]:
    """Milliseconds, clock and power of `launch`, which does its work `of` times."""
    jax.block_until_ready(launch())
    times_s: list[float] = []
    with sampled() as samples:
        end_s = time.perf_counter() + SECONDS
        while time.perf_counter() < end_s:
            start_s = time.perf_counter()
            for _ in range(TRAIN):
                last = launch()
            jax.block_until_ready(last)
            times_s.append((time.perf_counter() - start_s) / TRAIN / of)
    settled = samples[len(samples) // 2 :]
    clock, power, capped = (statistics.median(column) for column in zip(*settled, strict=True))
    return {"what": name, "ms": statistics.median(times_s) * 1e3, "first_ms": times_s[0] * 1e3, "clock_mhz": clock,
            "power_w": power, "power_limited": bool(capped)}  # fmt: skip


@contextlib.contextmanager
def sampled() -> Iterator[list[tuple[float, ...]]]:
    """Clock in MHz, power in watts and whether power limits it, every 50 ms while the body runs."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits"]
    samples: list[tuple[float, ...]] = []
    with subprocess.Popen([*command, "-lms", str(EVERY_MS)], stdout=subprocess.PIPE, text=True) as process:
        reader = threading.Thread(target=lambda: samples.extend(map(parsed, process.stdout or ())))
        reader.start()
        yield samples
        process.terminate()
        reader.join()


def parsed(line: str) -> tuple[float, ...]:
    clock, power, capped = (word.strip() for word in line.split(","))
    return float(clock), float(power), float(capped == "Active")


def queried(*names: str) -> dict[str, float]:
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(",")
    return {name: float(word) for name, word in zip(names, words, strict=True)}


if __name__ == "__main__":
    main()
