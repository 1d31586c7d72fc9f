"""Every backend that has all ops takes the same tests."""

from __future__ import annotations

import pytest

from dflash_jax.ops.dispatch import Kernels, backends


@pytest.fixture(params=backends())
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(request.param)
