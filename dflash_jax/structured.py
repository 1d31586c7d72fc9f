"""The shape that a request's text must have."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.errors import UserError

KINDS = ("json", "regex", "grammar", "choice", "json_object")


@dataclasses.dataclass(frozen=True)
class StructuredOutputs:
    """Exactly one of the fields is given.  Names as in vLLM.

    json: a JSON schema, as an object or as its text; kept as text, so that later changes of the object do nothing.
    regex: an expression that the whole text matches.  grammar: Lark as llguidance reads it, GBNF, or llguidance's own
    JSON.  choice: the texts that are allowed.  json_object: any JSON object.
    UserError for anything else; whether a schema, expression or grammar is sound shows when it is compiled.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise UserError(f"structured output: json_object must be true or false, not {self.json_object!r:.60}")
        given = self._given()
        if len(given) != 1:
            told = " and ".join(given) or "none"
            raise UserError(f"structured output needs exactly one of {', '.join(KINDS)}, not {told}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar"):
            _check_text(name, getattr(self, name))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return self._given()[0]

    @property
    def value(self) -> Any:
        """What it holds: text, a tuple of texts, or True."""
        return getattr(self, self.kind)

    def _given(self) -> list[str]:
        return [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]


def _schema_text(schema: object) -> str:
    """The schema on one line, keys in their order, which is the order in which they are written."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(dict(value) if isinstance(value, Mapping) else value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"structured output: json is not a JSON schema: {error}") from error
    if not isinstance(value, Mapping):
        raise UserError(f"structured output: json must be a JSON schema, which is an object, not {text:.60}")
    return text


def _check_text(name: str, value: object) -> None:
    if value is not None and not (isinstance(value, str) and value):
        raise UserError(f"structured output: {name} must be a text of at least one character, not {value!r:.60}")


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise UserError(f"structured output: choice must be a list of texts, not {value!r:.60}")
    bad = [text for text in value if not isinstance(text, str)]
    if bad:
        raise UserError(f"structured output: choice holds {bad[0]!r:.60}, which is not a text")
    return tuple(value)
