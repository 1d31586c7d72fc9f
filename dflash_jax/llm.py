"""`LLM`: prompts in, texts out, over the engine."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from tqdm import tqdm

from dflash_jax.demo import demo_draft_path, demo_target_path
from dflash_jax.drafters.registry import check_unused, find_factory
from dflash_jax.engine.engine import Engine, check_ids, random_seed
from dflash_jax.engine.loop import Update
from dflash_jax.engine.protocol import Grammar
from dflash_jax.engine.request import Request
from dflash_jax.engine.scheduler import check_length
from dflash_jax.engine.settings import EngineSettings
from dflash_jax.errors import GrammarError, UserError
from dflash_jax.logprobs import Logprob, by_position
from dflash_jax.sampling import SamplingParams, is_integer, known_params
from dflash_jax.structured import StructuredOutputs
from dflash_jax.text import Tokenizer, encode_chat, load_tokenizer
from dflash_jax.text.grammar import GrammarCompiler
from dflash_jax.text.stream import TextStream
from dflash_jax.weights import open_target

log = logging.getLogger("dflash_jax")

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages ({"role": …, "content": …})."""
News = deque[tuple["Job", Update]]
SIBLING_PRIORITY = -1  # ahead of waiting prompts: while the first sample runs, its prefix pages are sure to be there


@dataclasses.dataclass
class RequestOutput:
    """What became of one prompt, or of one of its samples: `outputs` are all n of them, this one first.

    token_ids: generated ones, with the stop token that ended them.  text: theirs, without that token and without the
    stop text (unless include_stop_str_in_output); None when the target has no tokenizer.  finish_reason: "stop",
    "length" or "abort" (`error` says why, when the model is to blame).  accept_lengths: tokens committed by each round,
    bonus included; the first token comes from prefill and is in no round.  cached_tokens: prompt tokens found in the
    prefix cache.  seed: what the noise was drawn with, None for greedy decoding; sample i has that of sample 0 plus i.
    Seconds: time_to_first_token_s counts from submission and includes compiling, decode_s (all tokens but the first)
    does not.
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
    seed: int | None = None
    error: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    index: int = 0
    others: list[RequestOutput] = dataclasses.field(default_factory=list)

    @property
    def outputs(self) -> list[RequestOutput]:
        """All samples of the prompt, in the order of their `index`, if this is the first."""
        return [self, *self.others]

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


class GenerationError(UserError):
    """Some prompts could not be finished: a sentence for each.  `outputs` are those of all prompts, in their order."""

    def __init__(self, outputs: Sequence[RequestOutput]):
        self.outputs = list(outputs)
        super().__init__("; ".join(one.error for out in outputs for one in out.outputs if one.error))


class Job:
    """A sample of a prompt on its way: its request, its text, what has been shown of it.

    `name` stands for it in messages.  `siblings` are all samples of the prompt, itself included, by `index`.
    """

    def __init__(self, name: str, prompt: Prompt, ids: list[int], params: SamplingParams, llm: LLM, index: int = 0):
        self.name = name
        self.prompt = prompt
        self.ids = ids
        self.params = params
        self.index = index
        self.siblings = [self]
        self.stream = make_stream(llm.tokenizer, params) if llm.tokenizer else None
        self.grammar = llm.grammar(params.structured_outputs)
        self.request: Request | None = None
        self._engine = llm.engine
        self._tokenizer = llm.tokenizer
        self._dropped = False
        self._shown = 0
        self._compile_s: list[float] = []  # the engine's `compile_s` at the first token and at the latest

    @property
    def finished(self) -> bool:
        return self._dropped or (self.request is not None and self.request.finished)

    def submit(self, eos_token_ids: Sequence[int], news: News) -> None:
        """Queue the request; the job goes to `news` whenever it has new tokens, and when it has ended."""
        self.request = self._engine.add_request(
            self.ids,
            self.params,
            on_tokens=self._on_tokens,
            on_update=lambda update: news.append((self, update)),
            eos_token_ids=eos_token_ids,
            priority=SIBLING_PRIORITY if self.index else 0,
            grammar=self.grammar,
        )

    def abort(self) -> None:
        if self.request is None:
            self._dropped = True
        else:
            self._engine.abort_request(self.request)

    def _on_tokens(self, request: Request, tokens: Sequence[int]) -> bool:
        """Engine callback: True when a stop text is complete; tokens after it are taken back."""
        self._compile_s = [*self._compile_s[:1], self._engine.compile_s]
        if self.stream is None:
            return False
        by_token = request.finish_reason == "stop"  # its last one, which is no part of the text
        used = self.stream.add(tokens[:-1] if by_token and not self.params.include_stop_str_in_output else tokens)
        if used is not None:
            request.drop_tail(len(tokens) - used)
        elif request.finished:
            self.stream.finish()
        return self.stream.stopped

    def new_text(self) -> str:
        """Text that may be shown and has not been."""
        if self.stream is None:
            return ""
        if self.finished:
            self.stream.finish()
        text = self.stream.released
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new

    def new_ids(self) -> str:
        """For a target without a tokenizer: the ids not shown yet, as a continuation of a comma-separated list."""
        ids = self.request.output_ids if self.request else []
        new = "".join(f",{token}" if i or self._shown else str(token) for i, token in enumerate(ids[self._shown :]))
        self._shown = len(ids)
        return new

    @property
    def error(self) -> str | None:
        if self.request is None or self.request.finish_reason != "error":
            return None
        if self.request.error is not None:
            return f"{self.name} had to be given up: {self.request.error}"
        after = f"after {len(self.request.output_ids)} tokens" if self.request.output_ids else "at its first token"
        return (
            f"{self.name} had to be given up {after}: the target's logits are not numbers (NaN);"
            " its weights are damaged or their values too large for the dtype in use"
        )

    def output(self) -> RequestOutput:
        """What there is so far; a job that was never submitted counts as aborted."""
        request = self.request or Request("", self.ids, 1, finish_reason="abort")
        if self.stream and request.finish_reason:
            self.stream.finish()
        first_s, end_s = request.first_token_s, request.finish_s
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=self.ids,
            token_ids=list(request.output_ids),
            text=self.stream.text if self.stream else None,
            finish_reason="abort" if self.error else request.finish_reason,
            accept_lengths=list(request.accept_lengths),
            cached_tokens=request.cached_tokens,
            time_to_first_token_s=None if first_s is None else first_s - request.arrival_s,
            decode_s=None if first_s is None or end_s is None else self._decode_s(end_s - first_s),
            seed=getattr(request.sampling, "seed", self.params.seed) if not self.params.greedy else None,
            error=self.error,
            logprobs=self._logprobs(request),
            prompt_logprobs=self._prompt_logprobs(request),
            index=self.index,
        )

    def _logprobs(self, request: Request) -> list[dict[int, Logprob]] | None:
        if self.params.logprobs is None:
            return None
        return by_position(request.output_ids, request.logprobs, self._tokenizer)

    def _prompt_logprobs(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        found = request.prompt_logprobs
        return [None, *by_position(self.ids[1 : len(found) + 1], found, self._tokenizer)]

    def _decode_s(self, wall_s: float) -> float:
        compiling_s = self._compile_s[-1] - self._compile_s[0] if self._compile_s else 0.0
        return max(wall_s - compiling_s, 0.0)


def make_stream(tokenizer: Tokenizer, params: SamplingParams) -> TextStream:
    return TextStream(
        tokenizer, params.stop, include_stop=params.include_stop_str_in_output, min_tokens=params.min_tokens
    )


class LLM:
    """A target and its draft, ready to generate.

        llm = LLM(target="Qwen/Qwen3-8B", draft="z-lab/Qwen3-8B-DFlash-b16")
        llm.generate(["Why is the sky blue?"], SamplingParams(max_new_tokens=64))[0].text

    Without a target it is the demo pair; with a target and no draft it decodes plainly.  Other options are those
    of `EngineSettings`.  `platform` (cpu, gpu or tpu) must be given before JAX is used for anything else.
    Several threads may use it at once: their requests run together.
    """

    def __init__(
        self, target: str | None = None, draft: str | None = None, *, platform: str | None = None, **options: Any
    ):
        use_platform(platform)
        settings = make_settings(*choose_pair(target, draft), options)
        if settings.speculation == "never":  # the engine will not look at it
            check_unused(settings.draft, open_target(settings.target).config)
        self.engine = Engine(settings)
        self.tokenizer = load_tokenizer(self.engine.loaded.checkpoint.path)
        eos = self.tokenizer.eos_token_ids if self.tokenizer else ()
        self.eos_token_ids = tuple(dict.fromkeys((*self.engine.loaded.config.eos_token_ids, *eos)))
        self._making_grammars = threading.Lock()
        self._grammars: GrammarCompiler | None = None

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
        all prompts or one each.  With n > 1 an output is that of the first sample, and its `outputs` are all: each is
        what a request of its own with its seed would give, and they share the prompt's pages.  UserError for a bad
        prompt, before any of them runs; GenerationError, after all others are done, for one on which the model itself
        fails.
        """
        jobs = self.make_jobs(prompts, params)
        with tqdm(total=len(jobs), desc="outputs", disable=not progress) as bar:
            for job in self.serve(jobs):
                bar.update(job.finished)
        outputs = gather(jobs)
        if any(one.error for out in outputs for one in out.outputs):
            raise GenerationError(outputs)
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one prompt, piece by piece as it is accepted.  Leaving early aborts the request."""
        if self.tokenizer is None:
            raise UserError(f"target {self.target} has no tokenizer, so there is no text to stream")
        params = known_params(params)
        if params.n > 1:
            raise UserError(f"a stream is the text of one sample, and n is {params.n}")
        jobs = self.make_jobs([prompt], params)
        return self._stream(jobs[0])

    def _stream(self, job: Job) -> Iterator[str]:
        for _ in self.serve([job]):
            if text := job.new_text():
                yield text
        if text := job.new_text():  # it may have ended in steps that others took
            yield text
        if job.error:
            raise GenerationError([job.output()])

    # -- for front ends that show several prompts as they go --------------------------------------------------------

    def make_jobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        names: Sequence[str] | None = None,
    ) -> list[Job]:
        """A job for each sample of each prompt: token ids, checked before any of them runs.

        `names` stand for the prompts in messages.
        """
        listed = prompt_list(prompts)
        if names is None:
            names = ["the prompt"] if len(listed) == 1 else [f"prompt {i}" for i in range(1, len(listed) + 1)]
        each = params_list(params, len(listed))
        return [job for one in zip(names, listed, each, strict=True) for job in self._jobs(*one)]

    def _jobs(self, name: str, prompt: Prompt, params: SamplingParams) -> list[Job]:
        if params.stop and self.tokenizer is None:
            raise UserError(f"target {self.target} has no tokenizer, so stop texts cannot be found: use stop_token_ids"
                            " (--stop-token-ids)")  # fmt: skip
        try:
            ids = self.encode(prompt)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        check_ids(name, ids, self.engine.loaded.config.vocab_size)
        check_length(name, len(ids), self.engine.max_model_len)
        if params.n == 1:
            return [Job(name, prompt, ids, params, self)]
        samples = sample_params(params)
        jobs = [Job(f"{name}, sample {i}", prompt, ids, one, self, i) for i, one in enumerate(samples)]
        for job in jobs:
            job.siblings = jobs
        return jobs

    def grammar(self, asked: StructuredOutputs | None) -> Grammar | None:
        """A new state of what is asked for, compiled once for all requests that ask for the same."""
        if asked is None:
            return None
        with self._making_grammars:
            if self._grammars is None:  # takes a second, and most never need it
                vocab_size = self.engine.loaded.config.vocab_size
                self._grammars = GrammarCompiler(self.tokenizer, vocab_size, self.eos_token_ids)
        return self._grammars.compile(asked)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt of any kind."""
        if isinstance(prompt, str):
            return self._need_tokenizer().encode(prompt)
        if isinstance(prompt, (bytes, Mapping)) or not hasattr(prompt, "__iter__"):
            raise UserError(f"a prompt is text, a list of token ids or a list of chat messages, not {prompt!r:.60}")
        items: list[Any] = list(prompt)
        if items and isinstance(items[0], Mapping):
            return encode_chat(self._need_tokenizer(), items)
        return [int(item) if is_integer(item) else item for item in items]

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(f"target {self.target} has no tokenizer: give token ids instead of text")
        return self.tokenizer

    def serve(self, jobs: Sequence[Job]) -> Generator[Job, None, None]:
        """Run jobs together; yields a job each time it has new tokens or ends.  Leaving early aborts those left.

        The first sample of a prompt goes ahead; the others follow when it has a token, and then find its prefix pages.
        """
        news: News = deque()
        try:
            for job in jobs:
                if job.index == 0:
                    job.submit(self.eos_token_ids, news)
            left = len(jobs)
            while left:
                self.engine.advance(unless=lambda: bool(news))
                while news:
                    job, update = news.popleft()
                    left -= update.finish_reason is not None
                    if update.request.error is not None and not isinstance(update.request.error, GrammarError):
                        raise update.request.error
                    for dropped in self._go_on(job, update, news):
                        left -= 1
                        yield dropped
                    yield job
        finally:
            for job in jobs:
                job.abort()
            if self.engine.has_work:  # what is in flight for these jobs lands, so that its pages are free again
                self.engine.advance()

    def _go_on(self, job: Job, update: Update, news: News) -> list[Job]:
        """Submit the samples that waited for this one; after an abort all end, and those that waited are returned."""
        waiting = [sibling for sibling in job.siblings if sibling.request is None and not sibling.finished]
        if update.finish_reason == "abort":
            for sibling in job.siblings:
                sibling.abort()
            return waiting
        for sibling in waiting:
            sibling.submit(self.eos_token_ids, news)
        return []


def gather(jobs: Sequence[Job]) -> list[RequestOutput]:
    """An output for each prompt: the first sample's, with those of the others."""
    return [
        dataclasses.replace(job.output(), others=[other.output() for other in job.siblings[1:]])
        for job in jobs
        if job.index == 0
    ]


def sample_params(params: SamplingParams) -> list[SamplingParams]:
    """Parameters of each of the n samples: their seeds count up from the first one's, modulo 2**64."""
    seed = random_seed() if params.seed is None else params.seed
    return [dataclasses.replace(params, n=1, seed=(seed + i) % 2**64 if i else seed) for i in range(params.n)]


def prompt_list(prompts: Any) -> list[Any]:
    """One prompt (text, ids or messages) or several, as a list."""
    if isinstance(prompts, (str, bytes, Mapping)) or not hasattr(prompts, "__iter__"):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and (is_integer(items[0]) or isinstance(items[0], Mapping)) else items


def params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Sampling parameters for each of `count` prompts."""
    if params is None or isinstance(params, (SamplingParams, str, Mapping)) or not isinstance(params, Iterable):
        return [known_params(params)] * count  # pyright: ignore[reportArgumentType]
    each = [known_params(one) for one in params]
    if len(each) != count:
        raise UserError(f"{len(each)} sampling parameters for {count} prompts")
    return each


def make_settings(target: str, draft: str, options: Mapping[str, Any]) -> EngineSettings:
    known = [field.name for field in dataclasses.fields(EngineSettings)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise UserError(f"LLM has no option {', '.join(unknown)} (options: {', '.join(known)})")
    heat = options.get("draft_temperature")
    if heat is not None and options.get("draft_sampling") == "argmax":
        raise UserError(f"draft_temperature {heat} has no meaning with draft_sampling 'argmax'")
    if heat is not None and draft == "none":
        raise UserError(f"draft_temperature {heat} needs a draft, and draft is 'none'")
    if heat is not None and find_factory(str(draft))[0] == "ngram":
        raise UserError(f"draft_temperature {heat} has no meaning with draft {draft!r}, which looks its tokens up")
    return EngineSettings(target=str(target), draft=str(draft), **options)


def choose_pair(target: str | None, draft: str | None) -> tuple[str, str]:
    """Target and draft to open: without a target the demo pair, without a draft plain decoding."""
    for name, given in (("target", target), ("draft", draft)):
        if given is not None and not str(given).strip():
            raise UserError(f"{name} is empty: name one, or leave the option out for the default")
    if target is None:
        target = str(demo_target_path(progress=log.isEnabledFor(logging.WARNING)))
        if draft is None:
            shipped = demo_draft_path()
            if shipped is None:
                log.warning("the demo draft is not trained yet: decoding without a draft")
            draft = str(shipped) if shipped else None
    elif draft is None:
        log.warning("no draft is given: decoding without a draft")
    return target, draft or "none"


def use_platform(name: str | None) -> None:
    """Make JAX use `cpu`, `gpu` or `tpu`; None leaves the choice to JAX.  UserError where that is not to be had."""
    if name is None:
        return
    if name not in ("cpu", "gpu", "tpu"):
        raise UserError(f"platform {name!r} is not one of cpu, gpu, tpu")
    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    # With the CPU beside it, a platform whose plugin is not installed is simply not found.
    jax.config.update("jax_platforms", "cpu" if name == "cpu" else f"{'cuda' if name == 'gpu' else name},cpu")
    try:
        found = jax.default_backend()
        reason = f"JAX finds only {found}"
    except RuntimeError as error:
        found, reason = None, str(error).partition(" (set JAX_PLATFORMS")[0].splitlines()[0]
    if found != name:
        jax.config.update("jax_platforms", before)
        raise UserError(f"platform {name!r} cannot be used here: {reason}")
