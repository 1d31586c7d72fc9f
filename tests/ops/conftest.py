"""Every backend that can be used here takes the same tests; without a GPU Triton's kernels are interpreted."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from dflash_jax.ops import native
from dflash_jax.ops.dispatch import Kernels, backends, interpreted, select
from ops.triton_host import HAVE_TRITON, interpreting

PLATFORM = jax.default_backend()
BACKENDS = [*backends(PLATFORM), *interpreted(PLATFORM)]
HOSTED = "triton, interpreted"
# Each program of a grid takes milliseconds.
HOSTED_IN = (
    "test_accept", "test_block", "test_head", "test_attention", "test_projected", "test_top_tokens", "test_norm",
    "test_products", "test_write",
)  # fmt: skip
NATIVE_IN = ("test_attention", "test_projected", "test_norm")  # all other ops are XLA's; its products: test_native


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernels" in metafunc.fixturenames:
        hosted = HAVE_TRITON and "triton" not in BACKENDS and metafunc.definition.path.stem in HOSTED_IN
        known = [name for name in BACKENDS if name != native.NAME or metafunc.definition.path.stem in NATIVE_IN]
        metafunc.parametrize("kernels", [*known, *([HOSTED] if hosted else [])], indirect=True)


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    if request.param != HOSTED:
        yield select(request.param, PLATFORM)
        return
    with interpreting():
        yield Kernels("triton")
