"""The exception type that stands for a user's mistake, and the one for a request that cannot go on."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(ValueError):
    """A mistake the user can mend: bad option, bad file, bad request.

    The message is one sentence that names the thing and the values. Command lines print it
    and exit with code 2; library callers may catch it.
    """


class CheckpointError(UserError):
    """Everything that is wrong with a checkpoint, found in one pass and reported together."""

    def __init__(self, where: str, problems: Sequence[str]):
        self.where = where
        self.problems = tuple(problems)
        head = f"{where}: {len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__(head + ": " + "; ".join(self.problems))


class GrammarError(RuntimeError):
    """A request's grammar cannot be followed any further; nobody else is concerned."""
