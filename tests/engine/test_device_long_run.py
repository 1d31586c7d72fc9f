"""Thousands of short requests in one process: nothing grows, nothing is traced, nothing changes."""

from __future__ import annotations

import gc
import os
import random
import sys
from pathlib import Path

import jax
import pytest

from dflash_jax import Engine

from .bank import Known, sure_prompts
from .device import V2, Device, greedy, open_device, outcome

LENGTHS = (1, 2, 3, 5, 8, 9, 12, 20)
KEEP_BUSY = 12


@pytest.mark.parametrize("number", [600, pytest.param(5000, marks=pytest.mark.soak)])
def test_nothing_grows(number: int, no_retrace) -> None:
    device = open_device(V2)
    known = sure_prompts(device, LENGTHS, 8)
    engine = device.engine(num_pages=60)  # few, so that the prefix cache is full soon
    engine.warmup(progress=False)
    first = serve_some(device, engine, known, 300, seed=0)
    before = footprint()
    with no_retrace():
        serve_some(device, engine, known, number - 300, seed=1)
        again = serve_some(device, engine, known, 300, seed=0)
    after = footprint()
    assert again == first, "the same requests in the same order"
    assert engine.metrics().request_success["length"] == number + 300
    assert after["resident_bytes"] < 1.02 * before["resident_bytes"]
    assert after["device_arrays"] <= before["device_arrays"] + 64, "the runner keeps so many batches of slots"
    grown = after["python_blocks"] - before["python_blocks"]
    assert grown < 500 + number, "15 for each request that is kept; up to 400 for caches that were not full before"


def serve_some(device: Device, engine: Engine, known: list[Known], number: int, seed: int) -> int:
    """Known prompts with random heads and limits; those without a head must give what is known.

    Returns a number that stands for all outputs, and keeps none of them.
    """
    rng = random.Random(seed)
    seen = 0
    for index in range(number):
        one, new = rng.choice(known), rng.randrange(1, 8)
        head = [rng.randrange(device.vocab_size) for _ in range(rng.choice((0, 0, 9)))]
        request = engine.add_request([*head, *one.prompt], greedy(new))
        while engine.has_work and (len(engine._clients) >= KEEP_BUSY or index == number - 1):
            for update in engine.step():
                if update.finish_reason:
                    seen += hash((tuple(update.request.prompt_ids), tuple(update.request.output_ids)))
        if not head and request.finished and not request.preemptions:
            assert outcome(request) == one.cut(new)
    return seen


def footprint() -> dict[str, int]:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    arrays = len(jax.live_arrays())
    return {"resident_bytes": resident, "device_arrays": arrays, "python_blocks": sys.getallocatedblocks()}
