"""The command line of the benchmark; see `docs/BENCHMARKS.md`."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
from collections.abc import Sequence

from dflash_jax.errors import UserError

EXIT_USER_ERROR, EXIT_INTERRUPTED = 2, 130
COMMANDS = {"run": ("run", "run"), "compare": ("compare", "compare"), "kernels": ("kernels", "kernels"),
            "round": ("round_report", "report_round"), "tune": ("tune", "tune")}  # fmt: skip
NEEDED = ("rich", "httpx")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        check_packages()
        command = words.pop(0) if words and words[0] in COMMANDS else "run"
        module, function = COMMANDS[command]
        return getattr(importlib.import_module(f"dflash_jax.benchmark.{module}"), function)(words)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def check_packages() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"the benchmark needs {' and '.join(missing)}: pip install 'dflash-jax[benchmark]'")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill keeps what was measured, as Ctrl-C does
    sys.exit(main())
