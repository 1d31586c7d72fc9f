"""Drafts chosen among some tokens only (`speculative_token_map`)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dflash_jax import LLM, SamplingParams, UserError
from dflash_jax.benchmark.ceiling import loaded_cost
from dflash_jax.drafters.token_map import FILE, find_token_map, read_token_map
from dflash_jax.engine.build import round_times_path

from .pairs import FOLDER, Case, block_sizes, cases_of, open_llm

VOCAB = 97
NAMES = ("qwen3-v1", "qwen3-v2")  # a draft without a selector and one with
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.5, seed=3, ignore_eos=True)


def write(path: Path, ids: object) -> str:
    path.write_text(json.dumps(ids), encoding="utf-8")
    return str(path)


def open_with(name: str, token_map: str) -> LLM:
    pair = FOLDER / name
    return open_llm(pair / "target", pair / "draft", speculative_token_map=token_map, chunked_prefill_size=16)


def well_drafted(name: str) -> Case:
    """The case with most tokens accepted of those that leave many tokens out."""
    cases = [c for c in cases_of(name, block_sizes(name)[0]) if c.accept_lengths and len(set(c.token_ids)) < VOCAB // 2]
    return max(cases, key=lambda case: max(case.accept_lengths))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_only_tokens_of_the_map_are_drafted_and_answers_stay(name: str, tmp_path: Path) -> None:
    case = well_drafted(name)
    assert max(case.accept_lengths) > 2
    all_tokens, others = range(VOCAB), set(range(VOCAB)) - set(case.token_ids)
    whole = open_with(name, write(tmp_path / "all.json", list(all_tokens)))
    fewer = open_with(name, write(tmp_path / "others.json", sorted(others)))
    costs = [loaded_cost(llm.engine.loaded, 16) for llm in (whole, fewer)]
    assert costs[0].draft_bytes == costs[1].draft_bytes - 4 * (len(others) - VOCAB)  # the ids themselves
    assert costs[0].draft_head_params * len(others) == costs[1].draft_head_params * VOCAB
    assert len({round_times_path(llm.engine.runner.steps.config, llm.engine.loaded) for llm in (whole, fewer)}) == 2
    [out] = whole.generate([case.prompt_ids], case.params)
    case.check(out.token_ids, out.accept_lengths)
    [out] = fewer.generate([case.prompt_ids], case.params)
    assert out.token_ids == case.token_ids
    assert out.accept_lengths == [1] * (case.max_new_tokens - 1)  # nothing that was drafted could be right
    sampled = [llm.generate([case.prompt_ids], SAMPLED)[0] for llm in (whole, fewer)]
    assert sampled[0].token_ids == sampled[1].token_ids
    assert sampled[0].accept_lengths == sampled[1].accept_lengths  # where a request samples, all tokens count


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "is not JSON"), ("{}", "is not a list of token ids"), ('["1"]', "is not a list of token ids"),
     ("[1, true]", "is not a list of token ids"), ("[3, 97]", "names token 97, outside 0 … 96"),
     ("[-1, 2]", "names token -1, outside 0 … 96"), ("[" * 200_000, "is not JSON"),
     ("[5, 5, 6]", "has 2 tokens, and the draft chooses among 3")],
)  # fmt: skip
def test_what_is_no_map_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "map.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=f"{path}.*{reason}"):
        read_token_map(path, VOCAB, 3)


def test_a_map_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the token map .*absent.json"):
        read_token_map(tmp_path / "absent.json", VOCAB, 1)


def test_ids_are_ascending(tmp_path: Path) -> None:
    ids = read_token_map(Path(write(tmp_path / "map.json", [9, 2, 2, 5])), VOCAB, 1)
    np.testing.assert_array_equal(ids, [2, 5, 9])


def test_which_file_it_is(tmp_path: Path) -> None:
    assert find_token_map("auto", tmp_path, "cpu") is None
    own = Path(write(tmp_path / FILE, [1]))
    assert find_token_map("auto", tmp_path, "cpu") == own
    assert find_token_map("auto", tmp_path, "gpu") is find_token_map("none", tmp_path, "cpu") is None
    assert find_token_map("other.json", tmp_path, "gpu") == find_token_map(Path("other.json"), tmp_path, "cpu")
    with pytest.raises(UserError, match="speculative_token_map ~nobody-at-all/map.json: "):
        find_token_map("~nobody-at-all/map.json", tmp_path, "cpu")


@pytest.mark.parametrize("draft", ["none", "ngram:3"])
def test_a_map_needs_a_dflash_draft(draft: str) -> None:
    with pytest.raises(UserError, match=f"speculative_token_map map.json needs a DFlash draft, and draft is '{draft}'"):
        open_llm(FOLDER / "qwen3-v1" / "target", draft, speculative_token_map="map.json")
