"""Servers with known times and counters, each in a thread: what is measured at them can be worked out by hand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Manner:
    """How a server answers.

    first_s, gap_s: before the first piece, and between two.  pieces: tokens in each streamed piece.  fault: what it
    does instead after the first piece ("garbage", "not json", "hang", "error", "cut") or at once ("status").
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    pieces: tuple[int, ...] = (1, 3, 3)
    api: str = "openai"
    usage: bool = True
    counters: bool = True
    ids: bool = False  # it tells token ids, as vLLM does
    fault: str | None = None
    told: dict[str, Any] = field(default_factory=dict)  # more for the last event (openai), or for meta_info (sglang)

    @property
    def tokens(self) -> int:
        return sum(self.pieces)


@dataclass
class Seen:
    """What was asked of a server, and its counters."""

    bodies: list[Any] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    drafts: int = 100  # from before anybody measured
    accepted: int = 50


class Handler(BaseHTTPRequestHandler):
    manner: Manner
    seen: Seen
    lock: threading.Lock
    protocol_version = "HTTP/1.0"  # the end of an answer is the end of its connection

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing: a test's stderr is looked at."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(json.dumps({"data": [{"id": "served-model"}]}))
        elif self.path == "/version" and self.manner.api == "openai" and self.manner.ids:
            self._send('{"version": "0"}')
        elif self.path == "/get_model_info" and self.manner.api == "sglang":
            self._send('{"model_path": "m"}')
        elif self.path == "/metrics" and self.manner.counters:
            self._send(metrics_text(self.seen))
        else:
            self._send("not here", 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            self.seen.bodies.append((self.path, body))
            self.seen.at_once += 1
            self.seen.most_at_once = max(self.seen.most_at_once, self.seen.at_once)
        try:
            self._answer()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has seen enough
        finally:
            with self.lock:
                self.seen.at_once -= 1
                self.seen.drafts += len(self.manner.pieces) - 1
                self.seen.accepted += self.manner.tokens - len(self.manner.pieces)

    def _answer(self) -> None:
        if self.manner.fault == "status":
            self._send("out of order", 503)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for index, size in enumerate(self.manner.pieces):
            time.sleep(self.manner.gap_s if index else self.manner.first_s)
            if index == 1 and self.manner.fault:
                self._fail(self.manner.fault)
                return
            self._event(self._piece(index, size))
        if self.manner.api == "openai":
            usage = {"usage": {"prompt_tokens": 5, "completion_tokens": self.manner.tokens}}
            self._event({"choices": [], **(usage if self.manner.usage else {}), **self.manner.told})
        self._write("data: [DONE]\n\n")

    def _piece(self, index: int, size: int) -> dict[str, Any]:
        last = index + 1 == len(self.manner.pieces)
        if self.manner.api == "openai":
            ids = {"token_ids": [index] * size} if self.manner.ids else {}
            return {"choices": [{"delta": {"content": "x" * size}, "finish_reason": "length" if last else None, **ids}]}
        done = sum(self.manner.pieces[: index + 1])
        meta = {"prompt_tokens": 5, "completion_tokens": done, "finish_reason": {"type": "length"} if last else None}
        return {"text": "x" * done, "output_ids": list(range(done)), "meta_info": {**meta, **self.manner.told}}

    def _fail(self, fault: str) -> None:
        if fault == "hang":
            time.sleep(1.5)
        said = {"garbage": "<html>busy</html>\n\n", "not json": "data: {oops\n\n",
                "error": 'data: {"error": {"message": "out of memory"}}\n\n'}  # fmt: skip
        self._write(said.get(fault, ""))

    def _event(self, value: Any) -> None:
        self._write(f"data: {json.dumps(value)}\n\n")

    def _write(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def _send(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


def metrics_text(seen: Seen) -> str:
    return (
        "# HELP vllm:spec_decode_num_drafts_total rounds\n"
        f'vllm:spec_decode_num_drafts_total{{model_name="m"}} {seen.drafts}.0\n'
        f'vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {seen.drafts * 4}.0\n'
        f'vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {seen.accepted}.0\n'
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="0"}} {seen.drafts}.0\n'
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="1"}} {seen.drafts // 2}.0\n'
    )


@contextmanager
def serving(manner: Manner) -> Iterator[tuple[str, Seen]]:
    """(url, what it has seen)."""
    seen = Seen()
    handler = type("Fake", (Handler,), {"manner": manner, "seen": seen, "lock": threading.Lock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
