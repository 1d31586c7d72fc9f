"""Every backend that can be used here takes the same tests."""

from __future__ import annotations

import jax
import pytest

from dflash_jax.ops.dispatch import Kernels, backends, interpreted, select

PLATFORM = jax.default_backend()


@pytest.fixture(params=(*backends(PLATFORM), *interpreted(PLATFORM)))
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return select(request.param, PLATFORM)
