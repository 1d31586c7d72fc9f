"""How long the device waits for the host between two steps, with overlap and without, and throughput by concurrency.

    python benchmarks/engine_overlap.py --target FILE.gguf --name engine-overlap-cpu

A step's end is seen by a thread that waits for its result; its launch by the stepping thread.  The device waited from
the end of step n to the launch of step n + 1, if that came later; the share is of the whole run, prefill included.
Aggregate throughput: so many requests at once, each its own prompt and the same number of new tokens, in rounds that
take turns so that a noisy machine troubles all alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import queue
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from record import record

from dflash_jax import Engine, EngineSettings, SamplingParams
from dflash_jax.engine.runner import DeviceRunner

PROMPT_TOKENS = 24
CONCURRENCY = (1, 2, 4, 8)


class Idle:
    """Adds up the time for which nothing was launched and everything launched had ended."""

    def __init__(self, runner: DeviceRunner):
        self.waited_s = 0.0
        self.steps = 0
        self._launches: queue.SimpleQueue[tuple[float, Any] | None] = queue.SimpleQueue()
        for name in ("prefill", "decode"):
            setattr(runner, name, self._seen(getattr(runner, name)))
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _seen(self, call: Any) -> Any:
        def launch(*args: Any) -> Any:
            pending = call(*args)
            self._launches.put((time.perf_counter(), pending.packed))
            return pending

        return launch

    def _watch(self) -> None:
        ended_s = None
        while (launch := self._launches.get()) is not None:
            launched_s, packed = launch
            if ended_s is not None:
                self.waited_s += max(0.0, launched_s - ended_s)
            packed.block_until_ready()
            ended_s = time.perf_counter()
            self.steps += 1

    def stop(self) -> None:
        self._launches.put(None)
        self._thread.join()


def prompts(count: int) -> list[list[int]]:
    return [[100 + (17 * i + 31 * j) % 1000 for j in range(PROMPT_TOKENS)] for i in range(count)]


def run(engine: Engine, count: int, new: int) -> float:
    """Seconds to serve `count` requests of `new` tokens."""
    start_s = time.perf_counter()
    for ids in prompts(count):
        engine.add_request(ids, SamplingParams(max_new_tokens=new, ignore_eos=True))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start_s


def idle_share(engine: Engine, count: int, new: int) -> dict[str, float]:
    watch = Idle(engine.runner)
    took_s = run(engine, count, new)
    watch.stop()
    for name in ("prefill", "decode"):
        delattr(engine.runner, name)
    return {"share": watch.waited_s / took_s, "step_ms": took_s / watch.steps * 1e3, "steps": watch.steps}


def measure_idle(engine: Engine, new: int, repeats: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(repeats):
        for overlap in (True, False):
            again = Engine(dataclasses.replace(engine.settings, overlap=overlap), engine.loaded, engine.runner)
            for count in (1, 8):
                name = f"{'overlap' if overlap else 'plain'} {count}"
                found.setdefault(name, []).append(idle_share(again, count, new))
    return {name: _summary(rows) for name, rows in found.items()}


def _summary(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    shares = [row["share"] for row in rows]
    return {"share_median": statistics.median(shares), "share_min": min(shares), "share_max": max(shares),
            "step_ms_median": statistics.median(row["step_ms"] for row in rows)}  # fmt: skip


def measure_throughput(engine: Engine, new: int, repeats: int) -> dict[str, Any]:
    """Tokens per second in all, by requests at once; best and median of the repeats."""
    rates: dict[int, list[float]] = {count: [] for count in CONCURRENCY}
    for _ in range(repeats):
        for count in CONCURRENCY:
            rates[count].append(count * new / run(engine, count, new))
    values: dict[str, Any] = {}
    for kind, pick in (("median", statistics.median), ("best", max)):
        values[kind] = {str(count): pick(found) for count, found in rates.items()}
        values[f"{kind}_ratio_8_to_1"] = values[kind]["8"] / values[kind]["1"]
    values["ratios_8_to_1"] = [many / one for many, one in zip(rates[8], rates[1], strict=True)]
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", default="none")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--name", default="engine-overlap-cpu")
    args = parser.parse_args()
    settings = EngineSettings(
        args.target, args.draft, dtype=args.dtype, max_running_requests=8, max_model_len=512, chunked_prefill_size=256,
        enable_prefix_caching=False, speculation="always",
    )  # fmt: skip
    engine, new = Engine(settings), args.new_tokens
    for count in CONCURRENCY:
        run(engine, count, new)  # compiles
    values: dict[str, Any] = {"dtype": str(engine.loaded.dtype), "new_tokens": new, "prompt_tokens": PROMPT_TOKENS}
    values["device_waits"] = measure_idle(engine, new, args.repeats)
    print(json.dumps(values["device_waits"], indent=1), flush=True)
    values["tokens_per_s"] = measure_throughput(engine, new, args.repeats)
    print(json.dumps(values["tokens_per_s"], indent=1))
    print("written:", record(args.name, values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
