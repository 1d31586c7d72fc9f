"""Prompts to token ids and back, the same for every contender that takes ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dflash_jax.benchmark.contender import Prompt
from dflash_jax.errors import UserError
from dflash_jax.text import Tokenizer, encode_chat


@dataclasses.dataclass(frozen=True)
class Codec:
    """A target's tokenizer; None for a target without one, which takes and gives ids alone."""

    tokenizer: Tokenizer | None = None

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of text, ids or chat messages; a model without chat template gets the last message as it stands."""
        items: Any = prompt
        if not isinstance(prompt, str) and isinstance(items[0], int):
            return items
        if self.tokenizer is None:
            raise UserError("the target has no tokenizer: ask for lengths with --input-len")
        if not isinstance(prompt, str) and self.tokenizer.chat_template is not None:
            return encode_chat(self.tokenizer, items)
        return self.tokenizer.encode(prompt if isinstance(prompt, str) else str(items[-1]["content"]))

    def decode(self, ids: Sequence[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(ids)

    def count(self, text: str) -> int | None:
        """Tokens of an answer."""
        return None if self.tokenizer is None else len(self.tokenizer.encode(text, add_special_tokens=False))
