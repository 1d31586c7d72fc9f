"""Each mistake is one sentence that names the thing and the values; with several prompts, before any of them runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_jax import LLM, SamplingParams, UserError

from .pairs import FOLDER, generate_one, open_llm
from .text_target import PAIR, known_prompt

NO_TOKENIZER = FOLDER / "x-v2-one-layer" / "target"


# -- prompts -----------------------------------------------------------------------------------------------------------

BAD_PROMPTS: list[tuple[Any, str]] = [
    ([[1], [71]], "prompt 2 holds 71, which is not a token id from 0 to 70"),
    ([[1, -1]], "the prompt holds -1, which is not a token id from 0 to 70"),
    ([[1, True]], "the prompt holds True, which is not a token id from 0 to 70"),
    ([[1, 2.0]], "the prompt holds 2.0, which is not a token id from 0 to 70"),
    ([["a", "b"]], "the prompt holds 'a', which is not a token id from 0 to 70"),
    ([[]], "the prompt is empty"),
    ("", "the prompt is empty"),
    ([[5] * 256, [1]], "prompt 1 has 256 tokens, which leaves no room for a new one in the 256 of max_model_len"),
    ("a\ud800", "the prompt: the text is not valid Unicode: lone surrogate U+D800 at position 1"),
    ([[1], None], "prompt 2: a prompt is text, a list of token ids or a list of chat messages, not None"),
    (b"abc", "the prompt: a prompt is text, a list of token ids or a list of chat messages, not b'abc'"),
    ({"role": "user", "content": "hi"}, "the prompt: a prompt is text, a list of token ids or a list of chat messages"),
    ([[{"role": "user"}]], "the prompt: messages[0].content is None, not a string"),
    ([[{"content": "hi"}]], "the prompt: messages[0].role is None, not a non-empty string"),
    (["hi", [{"role": "user", "content": "hi"}, "x"]], "prompt 2: messages[1] is 'x', not an object"),
]


@pytest.mark.parametrize("prompts, message", BAD_PROMPTS, ids=[message[:40] for _, message in BAD_PROMPTS])
def test_prompts(text_llm: LLM, prompts: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_llm.engine, "step", None)  # nothing runs
    with pytest.raises(UserError) as caught:
        text_llm.generate(prompts)
    assert str(caught.value).startswith(message)


def test_a_bad_prompt_leaves_nothing_behind(text_llm: LLM) -> None:
    with pytest.raises(UserError):
        text_llm.generate([[1], [2], [71]])
    assert not text_llm.engine.has_work
    assert generate_one(text_llm, known_prompt(), max_new_tokens=3).text == "hi"


def test_what_only_the_engine_can_refuse_leaves_nothing_behind_either(text_llm: LLM) -> None:
    params = [SamplingParams(), SamplingParams(stop_token_ids=[71])]
    with pytest.raises(UserError, match="stop_token_ids holds 71, which is not a token id from 0 to 70"):
        text_llm.generate([[1], [2]], params)
    metrics = text_llm.engine.metrics()
    assert (metrics.num_requests_running, metrics.num_requests_waiting, metrics.num_pages_held) == (0, 0, 0)


def test_a_target_without_tokenizer() -> None:
    llm = open_llm(NO_TOKENIZER, "none")
    for prompt in ("hi", [{"role": "user", "content": "hi"}]):
        with pytest.raises(UserError, match="target .*x-v2-one-layer/target has no tokenizer: give token ids instead"):
            llm.generate([prompt])
    with pytest.raises(UserError, match="has no tokenizer, so stop texts cannot be found: use stop_token_ids"):
        llm.generate([[1]], SamplingParams(stop="a"))
    assert generate_one(llm, [1], max_new_tokens=2).text is None


def test_max_model_len_bounds_prompt_and_output(text_target: Path) -> None:
    llm = open_llm(text_target, "none", max_model_len=24)
    with pytest.raises(
        UserError, match="the prompt has 24 tokens, which leaves no room for a new one in the 24 of max_mo"
    ):
        llm.generate([[5] * 24])
    out = generate_one(llm, [5] * 20, max_new_tokens=50, ignore_eos=True)
    assert (len(out.token_ids), out.finish_reason) == (4, "length")


# -- sampling parameters -----------------------------------------------------------------------------------------------

BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, not 0"),
    ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer of at least 1, not 2.5"),
    ({"max_new_tokens": True}, "max_new_tokens must be an integer of at least 1, not True"),
    ({"temperature": -0.1}, "temperature must be a number of at least 0, not -0.1"),
    ({"temperature": float("nan")}, "temperature must be a number of at least 0, not nan"),
    ({"temperature": float("inf")}, "temperature must be a number of at least 0, not inf"),
    ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
    ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0"),
    ({"top_p": 1.5}, "top_p must be above 0 and at most 1, not 1.5"),
    ({"top_k": -2}, "top_k must be a positive integer, or 0 for no limit, not -2"),
    ({"top_k": 1.0}, "top_k must be a positive integer, or 0 for no limit, not 1.0"),
    ({"min_p": 2}, "min_p must be from 0 to 1, not 2"),
    ({"min_p": None}, "min_p must be a number, not None"),
    ({"seed": "x"}, "seed must be an integer, not 'x'"),
    ({"min_tokens": -1}, "min_tokens must be from 0 to max_new_tokens, which is 256, not -1"),
    ({"min_tokens": 4, "max_new_tokens": 3}, "min_tokens must be from 0 to max_new_tokens, which is 3, not 4"),
    ({"min_tokens": 1.0}, "min_tokens must be from 0 to max_new_tokens, which is 256, not 1.0"),
    ({"n": 0, "temperature": 1}, "n must be an integer from 1 to 64, not 0"),
    ({"n": 65, "temperature": 1}, "n must be an integer from 1 to 64, not 65"),
    ({"n": True, "temperature": 1}, "n must be an integer from 1 to 64, not True"),
    ({"n": 2}, "n is 2, and greedy decoding gives one output: set a temperature, or n to 1"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output must be true or false, not 1"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids holds -1, which is not a token id"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids holds 'a', which is not a token id"),
    ({"stop_token_ids": range(9)}, "9 stop_token_ids are more than the 8 allowed"),
]


@pytest.mark.parametrize("values, message", BAD_PARAMS, ids=[str(values) for values, _ in BAD_PARAMS])
def test_sampling_parameters(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        SamplingParams(**values)
    assert str(caught.value) == message


def test_values_that_are_right() -> None:
    params = SamplingParams(max_new_tokens=np.int64(3), stop=None, stop_token_ids=np.array([4]), top_k=-1, top_p=1)  # pyright: ignore
    assert (params.max_new_tokens, params.stop, params.stop_token_ids) == (3, (), (4,))
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=5).stop_token_ids == (5,)  # pyright: ignore


# -- models and options ------------------------------------------------------------------------------------------------


def _folder(tmp_path: Path, **changes: Any) -> Path:
    """A copy of the target with changed keys in config.json."""
    folder = tmp_path / "target"
    shutil.copytree(NO_TOKENIZER, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"block_size": 0}, "block_size must be an integer of at least 2, not 0"),
    ({"block_size": 1}, "block_size must be an integer of at least 2, not 1"),
    ({"block_size": 13}, "block_size 13 is outside 2 … 12"),
    ({"draft": "none", "block_size": 4}, "block_size 4 needs a draft, and draft is 'none'"),
    ({"draft": str(FOLDER / "qwen3-v1" / "draft")}, "target_layer_ids [1, 3, 5] must name layers 0 to 4 of the target"),
    ({"draft": str(NO_TOKENIZER)}, "is not a draft"),
    ({"draft": "/no/such/folder"}, "/no/such/folder: no such file or folder"),
    ({"dtype": "float16"}, "dtype 'float16' is not one of auto, float32, bfloat16"),
    ({"kernels": "triton"}, "kernels 'triton' cannot be used: they run on gpu, and the platform is cpu"),
    ({"kernels": "cuda"}, "kernels 'cuda' is not one of auto, xla, pallas, triton"),
    ({"platform": "rocm"}, "platform 'rocm' is not one of cpu, gpu, tpu"),
    ({"max_model_len": 1}, "max_model_len must be an integer of at least 2, not 1"),
    ({"kv_cache_bytes": 1000}, "kv_cache_bytes 1000 holds 0 pages of 16 tokens"),
    ({"kv_cache_bytes": 0}, "kv_cache_bytes must be an integer of at least 1, not 0"),
    ({"max_running_requests": 0}, "max_running_requests must be an integer of at least 1, not 0"),
    ({"max_tokens": 5}, "LLM has no option max_tokens (options: target, draft, dtype, "),
]


@pytest.mark.parametrize("options, message", BAD_OPTIONS, ids=[message[:40] for _, message in BAD_OPTIONS])
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        LLM(str(NO_TOKENIZER), **{"draft": str(PAIR / "draft"), **options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_platform_that_is_not_there(platform: str) -> None:
    """Not only on a machine without one: JAX keeps the platform that a process began with."""
    import jax

    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if jax.default_backend() == platform:
        pytest.skip(f"this runs on {platform}")
    with pytest.raises(UserError, match=f"platform '{platform}' cannot be used here: "):
        LLM(str(NO_TOKENIZER), "none", platform=platform)
    assert jax.config.jax_platforms == before  # pyright: ignore[reportAttributeAccessIssue]


def test_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").write_bytes(b"x")
    for name, message in (
        ("empty", "has no config.json"),
        ("nowhere", "no such file or folder"),
        ("model.bin", "file"),
    ):
        with pytest.raises(UserError, match=message):
            LLM(str(tmp_path / name), "none")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="safetensors"):
        LLM(str(folder), "none")


def test_files_that_are_not_what_they_are_called(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "model.safetensors").write_bytes(b"not this")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        LLM(str(folder), "none")
    (folder / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json"):
        LLM(str(folder), "none")
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF and then nothing")
    with pytest.raises(UserError, match=r"model\.gguf"):
        LLM(str(gguf), "none")


def test_a_tokenizer_that_is_not_json(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"tokenizer\.json is not valid JSON"):
        LLM(str(folder), "none")
