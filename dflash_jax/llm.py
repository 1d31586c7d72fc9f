"""`LLM`: prompts in, texts out, over the engine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
from tqdm import tqdm

from dflash_jax.demo import demo_draft_path, demo_target_path
from dflash_jax.engine.build import use_platform
from dflash_jax.engine.engine import Engine, check_ids
from dflash_jax.engine.request import Request
from dflash_jax.engine.settings import EngineSettings
from dflash_jax.errors import UserError
from dflash_jax.places import cache_folder
from dflash_jax.sampling import SamplingParams
from dflash_jax.text import Tokenizer, encode_chat, load_tokenizer
from dflash_jax.text.stream import TextStream

log = logging.getLogger("dflash_jax")

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages ({"role": …, "content": …})."""


@dataclasses.dataclass
class RequestOutput:
    """What became of one prompt; complete once `finish_reason` is set.

    accept_lengths: tokens committed by each round, bonus included (the first token comes from prefill and is in
    no round).  text is None when the target has no tokenizer.  Times in seconds.
    """

    prompt: Prompt
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str | None
    accept_lengths: list[int]
    cached_tokens: int
    time_to_first_token_s: float | None
    decode_s: float | None

    @property
    def rounds(self) -> int:
        return len(self.accept_lengths)

    @property
    def mean_accept_length(self) -> float | None:
        """Tokens per round; None when there was no round."""
        return sum(self.accept_lengths) / self.rounds if self.rounds else None

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed after the first token; None when there was no round."""
        return sum(self.accept_lengths) / self.decode_s if self.rounds and self.decode_s else None


class Job:
    """One prompt on its way: its request, its text, what has been shown of it."""

    def __init__(self, prompt: Prompt, ids: list[int], params: SamplingParams, tokenizer: Tokenizer | None):
        self.prompt = prompt
        self.ids = ids
        self.params = params
        self.stream = TextStream(tokenizer, params.stop) if tokenizer else None
        self.request: Request | None = None
        self.shown = 0

    @property
    def finished(self) -> bool:
        return self.request is not None and self.request.finished

    def on_tokens(self, request: Request, tokens: Sequence[int]) -> bool:
        """Engine callback: True when a stop string is complete; tokens after it are taken back."""
        if self.stream is None:
            return False
        used = self.stream.add(tokens)
        if used is not None:
            request.drop_tail(len(tokens) - used)
        return used is not None

    def new_text(self) -> str:
        """Text that may be shown and has not been."""
        if self.stream is None:
            return ""
        if self.finished:
            self.stream.finish()
        text = self.stream.text if self.finished else self.stream.released
        new, self.shown = text[self.shown :], max(self.shown, len(text))
        return new

    def new_ids(self) -> str:
        """For a target without a tokenizer: the ids not shown yet, as a continuation of a comma-separated list."""
        ids = self.request.output_ids if self.request else []
        new = "".join(f",{token}" if i or self.shown else str(token) for i, token in enumerate(ids[self.shown :]))
        self.shown = len(ids)
        return new

    def output(self) -> RequestOutput:
        request = self.request
        assert request is not None
        self.new_text()
        first, end = request.first_token_s, request.finish_s
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=self.ids,
            token_ids=list(request.output_ids),
            text=self.stream.text if self.stream else None,
            finish_reason=request.finish_reason,
            accept_lengths=list(request.accept_lengths),
            cached_tokens=request.cached_tokens,
            time_to_first_token_s=None if first is None else first - request.arrival_s,
            decode_s=None if first is None or end is None else max(end - first, 0.0),
        )


class LLM:
    """A target and its draft, ready to generate.

        llm = LLM(target="Qwen/Qwen3-8B", draft="z-lab/Qwen3-8B-DFlash-b16")
        llm.generate(["Why is the sky blue?"], SamplingParams(max_new_tokens=64))[0].text

    Without a target it is the demo pair; with a target and no draft it decodes plainly.  Other options are those
    of `EngineSettings`.  `platform` (cpu, gpu or tpu) must be given before JAX is used for anything else.
    """

    def __init__(
        self, target: str | None = None, draft: str | None = None, *, platform: str | None = None, **options: Any
    ):
        use_platform(platform)
        use_compilation_cache()
        target, draft = choose_pair(target, draft)
        self.engine = Engine(make_settings(target, draft, options))
        self.tokenizer = load_tokenizer(self.engine.loaded.checkpoint.path)
        eos = self.tokenizer.eos_token_ids if self.tokenizer else ()
        self._eos = tuple(dict.fromkeys((*self.engine.loaded.config.eos_token_ids, *eos)))

    @property
    def target(self) -> str:
        return self.engine.settings.target

    @property
    def draft(self) -> str:
        return self.engine.settings.draft

    @property
    def platform(self) -> str:
        return self.engine.loaded.platform

    @property
    def dtype(self) -> str:
        return str(self.engine.loaded.dtype)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts; a single prompt counts as a list of one.

        A text is continued as it stands; chat messages go through the model's chat template.  `params` is one for
        all prompts or one each.
        """
        jobs = self.make_jobs(prompts, params)
        with tqdm(total=len(jobs), desc="prompts", disable=not progress) as bar:
            for job in self.serve(jobs):
                bar.update(job.finished)
        return [job.output() for job in jobs]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one prompt, piece by piece as it is accepted.  Leaving early aborts the request."""
        if self.tokenizer is None:
            raise UserError(f"target {self.target} has no tokenizer, so there is no text to stream")
        for job in self.serve(self.make_jobs(prompt, params)):
            if text := job.new_text():
                yield text

    def make_jobs(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Job]:
        """Prompts as token ids, checked before any of them runs."""
        listed = prompt_list(prompts)
        each = [params] * len(listed) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(listed):
            raise UserError(f"{len(each)} sampling parameters for {len(listed)} prompts")
        return [
            self._job(prompt, one or SamplingParams(), f"prompt {i} " if len(listed) > 1 else "the prompt ")
            for i, (prompt, one) in enumerate(zip(listed, each, strict=True), 1)
        ]

    def _job(self, prompt: Prompt, params: SamplingParams, label: str) -> Job:
        if params.stop and self.tokenizer is None:
            raise UserError(f"target {self.target} has no tokenizer, so stop texts cannot be found: use stop_token_ids")
        ids = self.encode(prompt)
        check_ids(label.strip(), ids, self.engine.loaded.config.vocab_size)
        if not ids:
            raise UserError(f"{label}is empty")
        longest = self.engine.max_model_len
        if len(ids) >= longest:
            room = f"which leaves no room for a new one in max_model_len {longest}"
            raise UserError(f"{label}has {len(ids)} tokens, {room}")
        return Job(prompt, ids, params, self.tokenizer)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt of any kind."""
        if not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], Mapping)):
            return list(prompt)  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise UserError(f"target {self.target} has no tokenizer: give token ids (--prompt-ids) instead of text")
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return encode_chat(self.tokenizer, prompt)  # type: ignore[arg-type]

    def serve(self, jobs: Sequence[Job]) -> Generator[Job, None, None]:
        """Run jobs together; yields a job each time it has new tokens.  Leaving early aborts those not finished."""
        by_id: dict[str, Job] = {}
        try:
            for job in jobs:
                job.request = self.engine.add_request(
                    job.ids, job.params, on_tokens=job.on_tokens, eos_token_ids=self._eos
                )
                by_id[job.request.request_id] = job
            while not all(job.finished for job in jobs):
                for update in self.engine.step():
                    if update.request.request_id in by_id:
                        yield by_id[update.request.request_id]
        finally:
            for job in jobs:
                if job.request is not None and not job.finished:
                    self.engine.abort(job.request.request_id)
            while self.engine.has_work:  # a launch in flight is read, so that its pages are free again
                self.engine.step()


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, ids or messages) or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and isinstance(items[0], (int, Mapping)) else items


def make_settings(target: str, draft: str, options: Mapping[str, Any]) -> EngineSettings:
    known = [field.name for field in dataclasses.fields(EngineSettings)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UserError(f"LLM has no option {', '.join(unknown)} (options: {', '.join(known)})")
    return EngineSettings(target=str(target), draft=str(draft), **options)


def choose_pair(target: str | None, draft: str | None) -> tuple[str, str]:
    """Target and draft to open: without a target the demo pair, without a draft plain decoding."""
    if target is None:
        target = str(demo_target_path())
        if draft is None:
            shipped = demo_draft_path()
            if shipped is None:
                log.warning("the demo draft is not trained yet: decoding without a draft")
            draft = str(shipped) if shipped else None
    elif draft is None:
        log.warning("no draft is given: decoding without a draft")
    return target, draft or "none"


def use_compilation_cache() -> None:
    """Keep compiled steps in the user's cache folder, unless JAX has been told of another place."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
