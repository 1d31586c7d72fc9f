"""Where a decode round's time goes on an accelerator, kernel by kernel, with random weights of a preset's shape.

    python benchmarks/round_profile.py --preset qwen3-8b --requests 1 --context 1000 [--plain] [--kernels triton]
    python benchmarks/round_profile.py --preset smollm2-135m --name round-profile-smollm2-h200

wall: milliseconds of a round in a train of 30, of which the last is waited for; each train begins with as many
committed tokens.  The kernels are those of 8 rounds under JAX's profiler; busy is their sum, and gaps are the device's
idle times between them.  XLA launches kernels one by one while it is profiled, not as a CUDA graph, so that gaps are at
least those of a round as it is.
"""

from __future__ import annotations

import argparse
import collections
import glob
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
from record import record

from dflash_jax.benchmark.round_report import make_timer, without_draft
from dflash_jax.benchmark.split import RoundTimer
from dflash_jax.benchmark.synthetic import random_pair
from dflash_jax.ops import select

TRAIN, REPEATS, TRACED, SHOWN = 30, 5, 8, 20


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--preset", default="smollm2-135m")
    p.add_argument("--requests", type=int, default=1)
    p.add_argument("--context", type=int, default=512)
    p.add_argument("--kernels", default="auto")
    p.add_argument("--plain", action="store_true", help="without the draft: one token a round")
    p.add_argument("--name", help="record the figures under benchmarks/results")
    args = p.parse_args()
    pair = random_pair(args.preset, "auto", True)
    loaded = without_draft(pair) if args.plain else pair
    block = loaded.drafter.max_block
    timer = make_timer(loaded, select(args.kernels, jax.default_backend()), args.requests, args.context, block)
    for _ in range(8):
        jax.block_until_ready(timer.whole())
    found = {"wall_ms": statistics.median(whole_train(timer) for _ in range(REPEATS)), **profiled(timer)}
    shape = f"{args.preset}, {args.requests} x {block} rows over {args.context}"
    print(f"{shape}: " + ", ".join(f"{key} {value:.3f}" for key, value in found.items() if key != "kernels"))
    for kernel in found["kernels"]:
        print(f"  {kernel['us']:8.1f} us {kernel['times']:6.1f} x  {kernel['name']}")
    if args.name:
        record(args.name, {"shape": shape, "plain": args.plain, "kernels": args.kernels, **found})


def whole_train(timer: RoundTimer) -> float:
    """Milliseconds of one of several rounds, with as many tokens committed as at first."""
    timer.rewind()
    return train(timer.whole, TRAIN)


def train(launch: Callable[[], Any], rounds: int) -> float:
    """Milliseconds of one of several rounds in a row."""
    start_s = time.perf_counter()
    for _ in range(rounds):
        last = launch()
    jax.block_until_ready(last)
    return (time.perf_counter() - start_s) / rounds * 1e3


def profiled(timer: RoundTimer) -> dict[str, Any]:
    """Busy and idle time of the device, and its kernels, for a round."""
    timer.rewind()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            train(timer.whole, TRACED)
        events = device_events(folder)
    spent, times, idle_us, end_us = collections.Counter(), collections.Counter(), 0.0, events[0][0]
    for start_us, lasted_us, name in events:
        idle_us += max(0.0, start_us - end_us)
        end_us = max(end_us, start_us + lasted_us)
        spent[name] += lasted_us
        times[name] += 1
    return {
        "busy_ms": sum(spent.values()) / TRACED / 1e3,
        "gaps_ms": idle_us / TRACED / 1e3,
        "launches": len(events) / TRACED,
        "kernels": [{"name": name[:80], "us": us / TRACED, "times": times[name] / TRACED}
                    for name, us in spent.most_common(SHOWN)],
    }  # fmt: skip


def device_events(folder: str) -> list[tuple[float, float, str]]:
    """(start, length, name) of all that ran on the device, in microseconds, in order."""
    [path] = glob.glob(f"{folder}/plugins/profile/*/*.trace.json.gz")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    named = {(e["name"], e["pid"], e.get("tid")): e["args"]["name"] for e in events
             if e.get("ph") == "M" and "name" in e.get("args", {})}  # fmt: skip

    def on_device(e: dict[str, Any]) -> bool:
        process = named.get(("process_name", e["pid"], None), "")
        return "/device:" in process and "Stream" in named.get(("thread_name", e["pid"], e["tid"]), "")

    found = sorted((e["ts"], e["dur"], e["name"]) for e in events if e.get("ph") == "X" and on_device(e))
    if not found:
        raise SystemExit(f"the profile of {jax.devices()[0].device_kind} names no kernels: this is for GPUs")
    return found


if __name__ == "__main__":
    main()
