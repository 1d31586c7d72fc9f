"""Which backend computes an op: what is asked for is had or refused, and what is chosen is said."""

from __future__ import annotations

import importlib.util

import pytest

from dflash_jax import UserError
from dflash_jax.ops import dispatch, reference
from dflash_jax.ops.dispatch import REFERENCE, Kernels, backends, select
from dflash_jax.ops.kernel_packages import kernel_names


@pytest.fixture
def with_jax_triton(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> bool:
    """Whether jax_triton seems to be installed."""
    find, installed = importlib.util.find_spec, request.param

    def found(name: str) -> object:
        return (object() if installed else None) if name == "jax_triton" else find(name)

    monkeypatch.setattr(dispatch.importlib.util, "find_spec", found)
    return installed


def test_kernels_bear_the_names_of_ops():
    assert set(kernel_names("triton")) <= set(REFERENCE)
    assert {"block_attention", "prefill_attention", "cache_write", "kv_inject"} <= set(kernel_names("triton"))


@pytest.mark.parametrize("with_jax_triton", [True, False], indirect=True)
def test_auto_is_triton_on_cuda_where_it_can_be(with_jax_triton: bool):
    chosen = select("auto", "gpu")
    assert chosen.backend == ("triton" if with_jax_triton else "xla")
    if with_jax_triton:
        assert "triton for" in chosen.reason and "block_attention" in chosen.reason and "(auto)" in chosen.reason
    else:
        assert "not triton: the package 'jax_triton' is missing" in chosen.reason
    assert backends("gpu") == (("xla", "triton") if with_jax_triton else ("xla",))


@pytest.mark.parametrize("with_jax_triton", [True], indirect=True)
def test_elsewhere_it_is_xla(with_jax_triton: bool):
    assert select("auto", "cpu") == Kernels("xla") and select("xla", "cpu").reason == "kernels: xla (asked for)"
    assert select("auto", "tpu").backend == "xla" and backends("cpu") == ("xla",)


@pytest.mark.parametrize("with_jax_triton", [False], indirect=True)
@pytest.mark.parametrize(
    ("choice", "platform", "message"),
    [("cuda", "gpu", "kernels 'cuda' is not one of auto, xla, pallas, triton"),
     ("triton", "cpu", r"they run on gpu, and the platform is cpu \(available: xla\)"),
     ("triton", "gpu", "the package 'jax_triton' is missing: pip install"),
     ("pallas", "tpu", "kernels 'pallas' cannot be used: there are none in this version yet")],
)  # fmt: skip
def test_what_cannot_be_had_is_refused(with_jax_triton: bool, choice: str, platform: str, message: str):
    with pytest.raises(UserError, match=message):
        select(choice, platform)


def test_an_op_without_a_kernel_is_the_reference_s():
    assert Kernels("triton").accept_bonus is reference.accept_bonus
    assert Kernels("xla").block_attention is reference.paged_attention
    with pytest.raises(AttributeError, match="matmul is not an op"):
        _ = Kernels().matmul
