"""Buckets, packing, sizes and memory: what stands between the scheduler's plain numbers and compiled steps."""

from __future__ import annotations

import dataclasses
import logging

import jax
import numpy as np
import pytest

from dflash_jax import EngineSettings, SamplingParams, UserError
from dflash_jax.cache import page_bytes
from dflash_jax.engine import build
from dflash_jax.engine.packing import (
    SMALLEST_PREFILL,
    Arrival,
    admission,
    bucket,
    buckets,
    combined,
    in_buckets,
    needs_of,
    prefill_buckets,
    table_updates,
)
from dflash_jax.engine.runner import MemoryUse
from dflash_jax.ops import FILTER, SAMPLE
from dflash_jax.state import EDIT_BYTES, Needs, no_edits

from .device import V2, greedy, open_device, random_prompt, serve_prompts


@pytest.mark.parametrize("largest", [1, 3, 8, 33, 48])
def test_every_number_has_the_smallest_bucket_that_holds_it(largest):
    sizes = buckets(largest)
    for n in range(1, largest + 1):
        assert bucket(n, largest) == min(size for size in sizes if size >= n)


@pytest.mark.parametrize(("rows", "chunk"), [(1, 7), (4, 32), (8, 64), (8, 100), (5, 512)])
def test_warm_up_compiles_the_prefills_that_can_come_and_no_others(rows, chunk):
    """The scheduler lets one row take the chunk, and several together no more than that."""
    possible = {
        (bucket(n, rows), bucket(width, chunk, SMALLEST_PREFILL))
        for n in range(1, rows + 1)
        for width in range(1, (chunk if n == 1 else chunk // n) + 1)
    }
    listed = prefill_buckets(rows, chunk)
    assert set(listed) == possible and len(listed) == len(possible)


def test_parts_go_to_the_smallest_size():
    assert [(len(part), size) for part, size in in_buckets(range(19), (1, 8))] == [(8, 8), (8, 8), (3, 8)]
    assert [(list(part), size) for part, size in in_buckets([7], (1, 8))] == [([7], 1)]
    assert list(in_buckets([], (1, 8))) == []


def test_spare_rows_name_the_padding_slot_and_page():
    params = SamplingParams(temperature=0.5, top_k=3, seed=2**40 + 5)
    got = admission([Arrival(2, 9, (4, 5), (7,), params)], 3, pages_per_slot=3, spare_slot=8)
    assert got.slots.tolist() == [2, 8, 8] and got.limit.tolist() == [9, 0, 0]
    assert got.page_table.tolist() == [[4, 5, 0], [0, 0, 0], [0, 0, 0]]
    assert got.stop_ids[0].tolist() == [7, *[-1] * 15] and (got.stop_ids[1:] == -1).all()
    assert got.sampling is not None
    assert got.sampling.temperature.tolist() == [0.5, 0, 0] and got.sampling.seed[0].tolist() == [5, 256]
    assert table_updates([(1, 2, 3)], 2, spare_slot=8).tolist() == [[1, 2, 3], [8, 0, 0]]


def test_what_a_request_needs_of_a_step():
    assert needs_of(None) == needs_of(SamplingParams()) == Needs()
    sample, nucleus = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)
    assert needs_of(sample) == Needs(SAMPLE)
    assert needs_of(nucleus) == needs_of(SamplingParams(temperature=1.0, top_k=1)) == Needs(FILTER)
    biased, watched = SamplingParams(logit_bias={3: 1.0}), SamplingParams(logprobs=3, prompt_logprobs=0)
    assert needs_of(biased) == Needs(edits=True) and needs_of(watched) == Needs(logprobs=20, prompt_logprobs=20)
    both = combined(map(needs_of, (sample, biased, SamplingParams(logprobs=0), watched)))
    assert both == Needs(FILTER, edits=True, logprobs=20, prompt_logprobs=20)
    assert combined([]) == Needs()


# -- the runner --------------------------------------------------------------------------------------------------------


def test_admissions_of_a_step_are_one_call_before_its_launch(monkeypatch):
    device = open_device(V2)
    keys = []
    update, launch = device.runner._update, device.runner._launch
    monkeypatch.setattr(device.runner, "_update", lambda key, *rest: (keys.append(key), update(key, *rest))[1])
    monkeypatch.setattr(device.runner, "_launch", lambda key, *a, **k: (launch(key, *a, **k), keys.append(key[:1]))[0])
    serve_prompts(device.engine(), [random_prompt(device, 5, seed) for seed in range(4)], greedy(2))
    assert keys[:2] == [("admit", 8), ("prefill",)] and ("admit", 1) not in keys


def test_small_batches_are_padded_to_the_smallest_that_is_asked_for(monkeypatch):
    device = open_device(V2)
    prompts = [random_prompt(device, 5, seed) for seed in range(3)]
    usual = serve_prompts(device.engine(), prompts, greedy(6))
    monkeypatch.setattr(device, "sizes", dataclasses.replace(device.sizes, min_batch=4))
    found, launch = set(), device.runner._launch
    monkeypatch.setattr(device.runner, "_launch", lambda key, *a, **k: (found.add(key[:2]), launch(key, *a, **k))[1])
    padded = serve_prompts(device.engine(), prompts, greedy(6))
    assert [r.output_ids for r in padded] == [r.output_ids for r in usual]
    assert [r.accept_lengths for r in padded] == [r.accept_lengths for r in usual]
    assert {key for key in found if key[0] == "decode_round"} == {("decode_round", 4)}
    assert [len(spare) for spare in device.runner.spare_batches()][0] == 4


def test_memory_is_told_in_bytes(caplog):
    device = open_device(V2)
    serve_prompts(device.engine(), [[1, 2, 3]], greedy(2))
    memory, sizes = device.engine().memory, device.sizes
    config = device.loaded.config
    assert memory.target_kv == sizes.num_pages * page_bytes(config, sizes.page_size, np.float32)
    assert memory.draft_state == sizes.num_pages * device.loaded.drafter.page_bytes(sizes.page_size, np.float32)
    assert memory.edits > 9 * config.vocab_size * (sizes.num_slots + 1)
    assert memory.target == sum(leaf.nbytes for leaf in jax.tree.leaves(device.weights.target))
    assert memory.scratch and f"scratch {memory.scratch / 1e6:.1f} MB" in str(memory)
    assert "scratch unknown until a step is compiled" in str(MemoryUse(1, 2, 3, 4, 5, None))
    with caplog.at_level(logging.INFO, "dflash_jax"):
        device.engine().warmup(progress=False)
    assert caplog.messages[-1] == str(device.engine().memory)


# -- sizes -------------------------------------------------------------------------------------------------------------


def sizes_for(**settings):
    device = open_device(V2)
    return build.plan_sizes(device.loaded, EngineSettings("", **settings))


def bytes_of_a_page(page_size: int) -> int:
    loaded = open_device(V2).loaded
    return page_bytes(loaded.config, page_size, loaded.dtype) + loaded.drafter.page_bytes(page_size, loaded.dtype)


@pytest.mark.parametrize("page_size", [8, 16, 64])
def test_26_both_pools_together_obey_the_budget(page_size):
    budget = 41 * bytes_of_a_page(page_size) - 1
    got = sizes_for(kv_cache_bytes=budget, page_size=page_size, max_model_len=4 * page_size, max_running_requests=32)
    assert got.num_pages == 40, "padding page included"


def test_the_smallest_batch_is_no_larger_than_the_largest():
    assert sizes_for(max_model_len=64, max_running_requests=6, min_decode_batch=6).min_batch == 6
    with pytest.raises(UserError, match="min_decode_batch 7 is above max_running_requests 6"):
        EngineSettings("", max_running_requests=6, min_decode_batch=7)


def test_more_requests_than_memory_has_slots_for_are_refused_at_once():
    """They would be allocated first, for minutes."""
    vocab = open_device(V2).loaded.config.vocab_size
    most = build.CPU_KV_CACHE_BYTES // (EDIT_BYTES * vocab)
    build.check_slots(most, vocab, build.CPU_KV_CACHE_BYTES)
    with pytest.raises(UserError, match=rf"max_running_requests {10**8} needs .* GB for penalties .*: {most} at most"):
        sizes_for(max_model_len=64, max_running_requests=10**8)


def test_what_a_slot_s_edits_take():
    edits = no_edits(3, 1000)
    assert sum(leaf.nbytes for leaf in (edits.bias, edits.emitted, edits.in_prompt)) == 3 * EDIT_BYTES * 1000


def test_no_more_pages_than_the_slots_can_use():
    got = sizes_for(max_model_len=64, max_running_requests=3, page_size=16)
    assert (got.num_pages, got.pages_per_slot) == (3 * 4 + 1, 4)


def test_a_budget_that_is_too_small_is_refused_with_its_numbers():
    with pytest.raises(UserError, match=r"kv_cache_bytes 99999 holds \d+ pages .* max_model_len 4096 needs 256"):
        sizes_for(kv_cache_bytes=99999, max_model_len=4096)


def test_without_a_length_the_pool_decides(caplog):
    budget = 9 * bytes_of_a_page(16)
    with caplog.at_level(logging.INFO, "dflash_jax"):
        got = sizes_for(kv_cache_bytes=budget)
    assert got.pages_per_slot == 8 and "max_model_len: 128 of the model's 256" in caplog.text


def test_a_length_that_the_model_was_not_made_for_is_told(caplog):
    assert sizes_for(max_model_len=256).pages_per_slot == 16 and not caplog.text
    assert sizes_for(max_model_len=512).pages_per_slot == 32
    assert "max_model_len: 512, though the model is made for 256" in caplog.text


def test_too_little_memory_for_the_pools_is_a_sentence(monkeypatch):
    loaded, sizes = open_device(V2).loaded, sizes_for(max_model_len=64, max_running_requests=3)

    def raising(text):
        def fail(*args):
            raise jax.errors.JaxRuntimeError(text)

        return fail

    monkeypatch.setattr(build, "make_pool", raising("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."))
    with pytest.raises(UserError, match="no memory for 13 pages of 16 tokens and 3 requests: lower kv_cache_bytes or"):
        build.make_state(loaded, sizes)
    monkeypatch.setattr(build, "make_pool", raising("INTERNAL: lost"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="lost"):
        build.make_state(loaded, sizes)


def test_the_default_budget_is_a_share_of_what_is_free(monkeypatch):
    loaded = open_device(V2).loaded
    assert build.default_kv_bytes(loaded) == build.CPU_KV_CACHE_BYTES

    class Gpu:
        platform = "gpu"

        class mesh:
            class devices:
                flat = [type("Device", (), {"memory_stats": lambda self: {"bytes_limit": 1000, "bytes_in_use": 400}})()]

    assert build.default_kv_bytes(Gpu()) == 480  # type: ignore[arg-type]


def test_compiled_steps_are_kept_unless_jax_was_told_where(monkeypatch, tmp_path):
    told = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    least = jax.config.jax_persistent_cache_min_compile_time_secs  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path))
    try:
        for before, after in [(str(tmp_path / "mine"), str(tmp_path / "mine")), (None, str(tmp_path / "compiled"))]:
            jax.config.update("jax_compilation_cache_dir", before)
            build.use_compilation_cache()
            assert jax.config.jax_compilation_cache_dir == after  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        jax.config.update("jax_compilation_cache_dir", told)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
