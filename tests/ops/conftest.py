"""Every backend that can be used here takes the same tests."""

from __future__ import annotations

import jax
import pytest

from dflash_jax.ops.dispatch import Kernels, backends


@pytest.fixture(params=backends(jax.default_backend()))
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(request.param)
