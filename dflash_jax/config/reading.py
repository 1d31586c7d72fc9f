"""Reading typed values out of JSON objects, with errors that name file, key and value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.errors import UserError

_MISSING = object()


class Reader:
    """Typed access to one JSON object; every error names `where` (usually the file).

    `scopes` are looked up in order; a key found in several scopes must have equal values
    there (a config that contradicts itself is an error, not a choice).
    """

    def __init__(self, where: str, *scopes: Mapping[str, Any]):
        self.where = where
        self.scopes = scopes

    def get(self, key: str, default: Any = _MISSING) -> Any:
        found = [scope[key] for scope in self.scopes if scope.get(key) is not None]
        if any(value != found[0] for value in found[1:]):
            raise UserError(f"{self.where}: {key} is given twice with different values: {found[0]!r} and {found[1]!r}")
        if found:
            return found[0]
        if default is _MISSING:
            raise UserError(f"{self.where}: {key} is missing")
        return default

    def integer(self, key: str, default: Any = _MISSING, *, low: int = 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise UserError(f"{self.where}: {key} must be an integer of at least {low}, not {value!r}")
        return value

    def number(self, key: str, default: Any = _MISSING, *, low: float = -math.inf) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UserError(f"{self.where}: {key} must be a number, not {value!r}")
        if value < low:
            raise UserError(f"{self.where}: {key} must be at least {low:g}, not {value!r}")
        return float(value)

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.where}: {key} must be true or false, not {value!r}")
        return value

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key, None) is None else self.number(key)

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.get(key, ())
        if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
            raise UserError(f"{self.where}: {key} must be a list of names, not {value!r}")
        return tuple(value)

    def integers(self, key: str, default: Any = _MISSING) -> tuple[int, ...]:
        value = self.get(key, default)
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(type(v) is int for v in value):
            raise UserError(f"{self.where}: {key} must be a list of integers, not {value!r}")
        return tuple(value)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.  Errors: unreadable, not JSON, not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError; brackets without end
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value
