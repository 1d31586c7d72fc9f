"""Servers by URL: OpenAI's protocol (vLLM and most others) and SGLang's own, streamed.

Acceptance is what the server itself tells: vLLM's counters at /metrics, SGLang's meta_info.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from dflash_jax.benchmark.contender import Ask, ContenderError, Counters, Response, together
from dflash_jax.benchmark.encoding import Codec
from dflash_jax.text.prompts import shortened

APIS = ("auto", "openai", "sglang")
WARM_TOKENS = 16
COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?"
                     r"(?:\{([^}]*)\})?\s+([0-9.eE+]+)", re.MULTILINE)  # fmt: skip
POSITION = re.compile(r'position="(\d+)"')


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Where a server is and how it is spoken to.  model: None is the first that it lists."""

    name: str
    url: str
    api: str = "auto"
    model: str | None = None
    timeout_s: float = 120.0


class ServerContender:
    """codec: of the target, if known; it counts tokens where a server does not, and encodes prompts for SGLang."""

    max_concurrency = None

    def __init__(self, options: ServerOptions, codec: Codec | None = None):
        self.name = options.name
        self.options = options
        self.codec = codec or Codec()
        self._client: httpx.AsyncClient | None = None
        self._api = options.api
        self._model = options.model
        self._is_vllm = False
        self._counted_by = "the server"

    @property
    def client(self) -> httpx.AsyncClient:
        assert self._client is not None, "opened first"
        return self._client

    async def open(self) -> None:
        limits = httpx.Limits(max_connections=None)
        timeout = httpx.Timeout(self.options.timeout_s)
        self._client = httpx.AsyncClient(
            base_url=self.options.url.rstrip("/"), timeout=timeout, limits=limits, trust_env=False
        )  # no proxy of the environment between the clock and the server
        with self._told():
            if self._api == "auto":
                self._api = "sglang" if await self._is_sglang() else "openai"
            self._is_vllm = (await self.client.get("/version")).status_code == 200
            if self._model is None and self._api == "openai":
                self._model = await self._first_model()

    async def _is_sglang(self) -> bool:
        """It tells its model's path, under a name that has changed."""
        for path in ("/model_info", "/get_model_info"):
            found = await self.client.get(path)
            if found.status_code == 200 and '"model_path"' in found.text:
                return True
        return False

    async def _first_model(self) -> str:
        found = await self._json("/v1/models")
        with self._form("/v1/models"):
            return str(found["data"][0]["id"])

    async def warm_up(self, asks: Sequence[Ask], concurrency: int) -> None:
        short = [dataclasses.replace(ask, max_tokens=min(ask.max_tokens, WARM_TOKENS)) for ask in asks]
        await together(map(self.generate, short[:concurrency]))

    async def generate(self, ask: Ask) -> Response:
        make, take = (sglang_body, take_sglang) if self._api == "sglang" else (openai_body, take_openai)
        path, body = make(ask, self._model or "", self.codec)
        if self._is_vllm:  # others may refuse what they do not know
            body["return_token_ids"] = True
        response = Response(ask.key, 0, 0, time.perf_counter(), [], text="")
        with self._told():
            async for event in self._events(path, body):
                with self._form(path):
                    take(response, event, time.perf_counter())
        return self._checked(response, path)

    def _checked(self, response: Response, path: str) -> Response:
        if not response.piece_s:
            raise ContenderError(f"{self._who}: {path} ended without any text")
        if response.finish_reason is None:
            raise ContenderError(f"{self._who}: {path} ended in the middle of an answer, without a finish_reason")
        if response.output_tokens == 0:  # no usage was told
            count = self.codec.count(response.text or "")
            if not count:
                raise ContenderError(f"{self._who}: {path} tells no usage, and no tokenizer is known to count tokens")
            self._counted_by = "the target's tokenizer"
            response.output_tokens = count
        return response

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        """The JSON objects of a stream of server-sent events, up to its [DONE]."""
        async with self.client.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                text = shortened((await answer.aread()).decode("utf-8", "replace").strip(), 200)
                raise ContenderError(f"{self._who}: {path} answers {answer.status_code}: {text}")
            async for line in answer.aiter_lines():
                if not line.strip() or line[0] == ":" or line.startswith(("event:", "id:", "retry:")):
                    continue
                if not line.startswith("data:"):
                    raise ContenderError(f"{self._who}: {path} streams something that is no event: {shortened(line)!r}")
                if (data := line[5:].strip()) == "[DONE]":
                    return
                yield self._parsed(data, path)

    def _parsed(self, data: str, path: str) -> Any:
        try:
            event = json.loads(data)
        except ValueError:
            raise ContenderError(f"{self._who}: {path} streams an event that is no JSON: {shortened(data)!r}") from None
        if isinstance(event, dict) and event.get("error"):
            raise ContenderError(f"{self._who}: {path} gives up: {shortened(json.dumps(event['error']), 200)}")
        return event

    def compile_s(self) -> float:
        return 0.0

    async def counters(self) -> Counters | None:
        """vLLM's, None where /metrics has none of them."""
        with self._told():
            found = await self.client.get("/metrics")
        return parse_counters(found.text) if found.status_code == 200 else None

    def facts(self) -> dict[str, Any]:
        return {
            "kind": "server",
            "url": self.options.url,
            "api": self._api,
            "model": self._model,
            "tokens_counted_by": self._counted_by,
        }

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    # -- what goes wrong -------------------------------------------------------------------------------------------

    @property
    def _who(self) -> str:
        return f"server {self.name} ({self.options.url})"

    async def _json(self, path: str) -> Any:
        found = await self.client.get(path)
        if found.status_code != 200:
            raise ContenderError(f"{self._who}: {path} answers {found.status_code}")
        return self._parsed(found.text, path)

    @contextlib.contextmanager
    def _told(self) -> Any:
        """The network's errors as one sentence each."""
        try:
            yield
        except httpx.TimeoutException as error:
            raise ContenderError(f"{self._who}: no answer within {self.options.timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            what = str(error).strip() or type(error).__name__
            raise ContenderError(f"{self._who}: {what}") from error

    @contextlib.contextmanager
    def _form(self, path: str) -> Any:
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ContenderError):
                raise
            what = f"{type(error).__name__}: {error}"
            raise ContenderError(f"{self._who}: {path} answers in an unknown form ({shortened(what)})") from error


# -- the two protocols -------------------------------------------------------------------------------------------------


def openai_body(ask: Ask, model: str, codec: Codec) -> tuple[str, dict[str, Any]]:
    body = {
        "model": model, "max_tokens": ask.max_tokens, "temperature": ask.temperature, "top_p": ask.top_p,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    body |= {"ignore_eos": True} if ask.ignore_eos else {}
    body |= {"top_k": ask.top_k} if ask.top_k else {}
    body |= {"seed": ask.seed} if ask.temperature else {}
    if is_chat(ask.prompt):
        return "/v1/chat/completions", {**body, "messages": ask.prompt}
    return "/v1/completions", {**body, "prompt": ask.prompt}


def take_openai(response: Response, event: Any, now_s: float) -> None:
    """An event of either endpoint; the last one has no choices and tells the usage."""
    if usage := event.get("usage"):
        response.prompt_tokens = int(usage["prompt_tokens"])
        response.output_tokens = int(usage["completion_tokens"])
    if meta := event.get("meta_info"):
        take_meta(response, meta)
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        piece = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if piece:
            response.piece_s.append(now_s)
            response.text = (response.text or "") + piece
        response.finish_reason = choice.get("finish_reason") or response.finish_reason
        if ids := choice.get("token_ids"):
            response.token_ids = [*(response.token_ids or ()), *ids]
        if meta := choice.get("meta_info"):
            take_meta(response, meta)


def sglang_body(ask: Ask, model: str, codec: Codec) -> tuple[str, dict[str, Any]]:
    """SGLang's own endpoint, with token ids, so that its chat template cannot differ from ours."""
    params: dict[str, Any] = {
        "max_new_tokens": ask.max_tokens, "temperature": ask.temperature, "top_p": ask.top_p,
        "ignore_eos": ask.ignore_eos,
    }  # fmt: skip
    params |= {"top_k": ask.top_k} if ask.top_k else {}
    return "/generate", {"input_ids": codec.encode(ask.prompt), "sampling_params": params, "stream": True}


def take_sglang(response: Response, event: Any, now_s: float) -> None:
    """Each event holds the whole text so far."""
    meta = event["meta_info"]
    tokens = int(meta["completion_tokens"])
    if tokens > response.output_tokens:
        response.piece_s.append(now_s)
    response.output_tokens = tokens
    response.prompt_tokens = int(meta.get("prompt_tokens", 0))
    response.text = event.get("text", response.text)
    if ids := event.get("output_ids"):  # all so far, or the new ones alone: a server's choice
        response.token_ids = ids if len(ids) == tokens else [*(response.token_ids or ()), *ids]
    finish = meta.get("finish_reason")
    response.finish_reason = finish.get("type") if isinstance(finish, dict) else finish
    take_meta(response, meta)


def take_meta(response: Response, meta: Any) -> None:
    """SGLang's acceptance of a response: told as it is, or by the number of its rounds."""
    if (told := meta.get("spec_accept_length")) is not None:
        response.accept_length = float(told)
    elif rounds := meta.get("spec_verify_ct"):
        response.accept_length = int(meta["completion_tokens"]) / int(rounds)


def is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def parse_counters(text: str) -> Counters | None:
    """vLLM's speculative counters out of Prometheus text, summed over engines; None without any."""
    totals: dict[str, int] = {}
    per_pos: dict[int, int] = {}
    for name, labels, value in COUNTER.findall(text):
        count = int(float(value))
        if name == "accepted_tokens_per_pos" and (found := POSITION.search(labels)):
            position = int(found[1])
            per_pos[position] = per_pos.get(position, 0) + count
        else:
            totals[name] = totals.get(name, 0) + count
    if "drafts" not in totals:
        return None
    accepted = [per_pos.get(i, 0) for i in range(max(per_pos, default=-1) + 1)]
    drafts = totals["drafts"]
    return Counters(
        drafts, totals.get("draft_tokens", 0), totals.get("accepted_tokens", 0), [drafts] * len(accepted), accepted
    )
