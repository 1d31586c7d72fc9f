"""Strict JAX settings for every test, set through the environment so that tests without JAX never import it."""

from __future__ import annotations

import collections
import gc
import logging
import os
import re
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import hypothesis
import pytest

TRACE_EVENT = "/jax/core/compile/jaxpr_trace_duration"
HOST_DEVICES = "--xla_force_host_platform_device_count"


def _strict_environment() -> None:
    """CPU with two devices, no implicit promotion, and compiled programs kept between runs.

    `DFLASH_JAX_TEST_PLATFORM=cuda` (or `tpu`) runs the same tests on an accelerator.
    """
    os.environ["JAX_PLATFORMS"] = os.environ.get("DFLASH_JAX_TEST_PLATFORM", "cpu")
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    flags = os.environ.get("XLA_FLAGS", "")
    if not re.search(HOST_DEVICES, flags):
        os.environ["XLA_FLAGS"] = f"{flags} {HOST_DEVICES}=2".strip()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_jax" / "test-programs"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")


_strict_environment()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs this in the background has it ignored

# Deterministic on a slow shared machine: no deadline, and the same examples every run.
hypothesis.settings.register_profile(
    "dflash",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("dflash"), max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dflash"))

MAPS, MAPS_LIMIT = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Lets go of compiled programs between files where they are many.

    On CPU a compiled program takes about 50 memory mappings, and Linux grants a process 65,530 by default: at about
    1,300 programs LLVM finds no memory and the process aborts.
    """
    result = yield
    if (nextitem is None or nextitem.path != item.path) and too_many_maps():
        import jax

        jax.clear_caches()
        gc.collect()
    return result


def too_many_maps(share: float = 0.3) -> bool:
    """Whether this process uses more than `share` of the memory mappings it may have (False where nobody counts)."""
    if not (MAPS.exists() and MAPS_LIMIT.exists()):
        return False
    with MAPS.open() as maps:
        return sum(1 for _ in maps) > share * int(MAPS_LIMIT.read_text())


NoRetrace = Callable[..., AbstractContextManager["collections.Counter[str]"]]


@contextmanager
def count_traces() -> Iterator[collections.Counter[str]]:
    """Counts, by function name, what JAX traces inside the block (a cached call traces nothing)."""
    import jax

    counts: collections.Counter[str] = collections.Counter()

    def listen(event: str, duration_secs: float, **metadata: str | int) -> None:
        if event == TRACE_EVENT:
            counts[str(metadata.get("fun_name", "unknown function"))] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextmanager
def _no_retrace(limit: int = 0, names: Sequence[str] | None = None) -> Iterator[collections.Counter[str]]:
    with count_traces() as counts:
        yield counts
    over = {name: n for name, n in counts.items() if n > limit and (names is None or name in names)}
    if over:
        found = ", ".join(f"{name} {n} time{'s' if n > 1 else ''}" for name, n in sorted(over.items()))
        pytest.fail(f"traced again: {found} (allowed: {limit})")


@pytest.fixture(autouse=True)
def same_log() -> Iterator[None]:
    """Command lines set the log up for their process; the next test finds it as it was."""
    log = logging.getLogger("dflash_jax")
    level, handlers = log.level, log.handlers[:]
    yield
    log.setLevel(level)
    log.handlers[:] = handlers


@pytest.fixture
def no_retrace() -> NoRetrace:
    """`with no_retrace(limit=0, names=None) as counts:` fails when a function is traced more than `limit` times inside.

    Warm up first, then wrap the rounds that must not trace.  `names` restricts the check to those functions;
    without it every function counts, small eager operations included.
    """
    return _no_retrace


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """The demo target's GGUF file; skips where `python -m dflash_jax.demo` has not fetched it."""
    from dflash_jax.demo import cached_demo_target

    path = cached_demo_target()
    if path is None:
        pytest.skip("the demo target is not in the cache; `python -m dflash_jax.demo` fetches it")
    return path
