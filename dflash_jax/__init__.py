"""Block-diffusion speculative decoding (DFlash) in JAX.

    from dflash_jax import LLM, SamplingParams

Names are imported when they are first used, so that `import dflash_jax` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_jax.engine.async_engine import AsyncEngine
    from dflash_jax.engine.engine import Engine, EngineStopped
    from dflash_jax.engine.settings import EngineSettings
    from dflash_jax.errors import CheckpointError, UserError
    from dflash_jax.llm import LLM, RequestOutput
    from dflash_jax.logprobs import Logprob
    from dflash_jax.sampling import SamplingParams
    from dflash_jax.structured import StructuredOutputs

__version__ = "0.1.0"

_HOMES = {
    "AsyncEngine": "engine.async_engine",
    "CheckpointError": "errors",
    "Engine": "engine.engine",
    "EngineSettings": "engine.settings",
    "EngineStopped": "engine.engine",
    "LLM": "llm",
    "Logprob": "logprobs",
    "RequestOutput": "llm",
    "SamplingParams": "sampling",
    "StructuredOutputs": "structured",
    "UserError": "errors",
}

__all__ = [
    "LLM", "AsyncEngine", "CheckpointError", "Engine", "EngineSettings", "EngineStopped", "Logprob",
    "RequestOutput", "SamplingParams", "StructuredOutputs", "UserError",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
