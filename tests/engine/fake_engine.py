"""An `Engine` over the fake device: what threads and tasks do to it, without a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from dflash_jax.drafters import Capabilities
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.settings import EngineSettings
from dflash_jax.sampling import SamplingParams

from .fake_runner import VOCAB, FakeRunner, Script, solo_run


@dataclasses.dataclass(frozen=True)
class Params(SamplingParams):
    """Sampling parameters that carry the fake's own knowledge of the request."""

    script: Script | None = None


def make_engine(*, overlap: bool = True, settings: dict[str, Any] | None = None, **sizes: Any) -> Engine:
    runner = FakeRunner(**sizes)
    config = SimpleNamespace(vocab_size=VOCAB, eos_token_ids=(), max_position=10**6)
    loaded = SimpleNamespace(config=config, drafter=SimpleNamespace(capabilities=Capabilities()))
    options = EngineSettings("", overlap=overlap, speculation="always", **(settings or {}))
    engine = Engine(options, loaded, runner)  # type: ignore[arg-type]
    runner.pool = engine._loop.scheduler.pool
    return engine


def params(prompt: Sequence[int], new: int = 8, right: Sequence[int] = (3, 0, 1)) -> Any:
    """Sampling parameters of a request whose drafts are right so often."""
    return Params(max_new_tokens=new, ignore_eos=True, script=Script(prompt, right))


def truth(prompt: Sequence[int], new: int = 8) -> list[int]:
    return solo_run(Script(prompt), new, block_size=4).tokens
