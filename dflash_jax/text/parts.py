"""What the readers of tokenizer files hand to `Tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers


@dataclass(frozen=True)
class TokenizerParts:
    """What a reader (folder or GGUF) found.

    special_tokens: template name ("bos_token", "eos_token", ...) to the token's text.
    frame: ids put before and after a prompt; None leaves that to the backend's post-processor.
    clean_up: spaces before punctuation are removed from decoded text.
    """

    backend: tokenizers.Tokenizer
    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    frame: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    clean_up: bool = False
