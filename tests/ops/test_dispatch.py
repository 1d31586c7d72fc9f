"""Which backend computes an op: what is asked for is had or refused, and what is chosen is said."""

from __future__ import annotations

import importlib.util

import pytest

from dflash_jax import UserError
from dflash_jax.ops import dispatch, reference
from dflash_jax.ops.dispatch import OPS, Kernels, backends, interpreted, select
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
    for backend in ("triton", "pallas"):
        assert set(kernel_names(backend)) <= set(OPS)
        assert {"block_attention", "prefill_attention", "cache_write", "kv_inject"} <= set(kernel_names(backend))


@pytest.mark.parametrize("with_jax_triton", [True, False], indirect=True)
def test_auto_is_triton_on_cuda_where_it_can_be(with_jax_triton: bool):
    chosen = select("auto", "gpu")
    assert chosen.backend == ("triton" if with_jax_triton else "xla")
    if with_jax_triton:
        assert "triton for" in chosen.reason and "block_attention" in chosen.reason and "(auto; " in chosen.reason
        assert "no faster: its prepare_block, accept_bonus, argmax_head" in chosen.reason
        assert "argmax_head" not in chosen.own_ops and "argmax_head" in select("triton", "gpu").own_ops
    else:
        assert "not triton: the package 'jax_triton' is missing" in chosen.reason
    assert backends("gpu") == (("xla", "triton") if with_jax_triton else ("xla",))


@pytest.mark.parametrize("with_jax_triton", [True], indirect=True)
def test_on_cpu_it_is_xla(with_jax_triton: bool):
    assert select("auto", "cpu") == Kernels("xla") and select("xla", "cpu").reason == "kernels: xla (asked for)"
    assert backends("cpu") == ("xla",)


def test_auto_is_pallas_on_tpu():
    chosen = select("auto", "tpu")
    assert chosen == Kernels("pallas") and backends("tpu") == ("xla", "pallas")
    assert "pallas for" in chosen.reason and "kv_inject" in chosen.reason and "(auto)" in chosen.reason


def test_pallas_is_interpreted_on_cpu_where_it_is_asked_for():
    chosen = select("pallas", "cpu")
    assert chosen == Kernels("pallas", interpret=True) != Kernels("pallas")
    assert "interpreted on cpu, which is slow and meant for tests" in chosen.reason
    assert interpreted("cpu") == ("pallas",) and interpreted("tpu") == interpreted("gpu") == ()


@pytest.mark.parametrize("with_jax_triton", [False], indirect=True)
@pytest.mark.parametrize(
    ("choice", "platform", "message"),
    [("cuda", "gpu", "kernels 'cuda' is not one of auto, xla, pallas, triton"),
     ("triton", "cpu", r"they run on gpu, and the platform is cpu \(available: xla\)"),
     ("triton", "gpu", "the package 'jax_triton' is missing: pip install"),
     ("pallas", "gpu", r"they run on tpu, and the platform is gpu \(available: xla\)")],
)  # fmt: skip
def test_what_cannot_be_had_is_refused(with_jax_triton: bool, choice: str, platform: str, message: str):
    with pytest.raises(UserError, match=message):
        select(choice, platform)


def test_an_op_without_a_kernel_is_the_reference_s():
    assert Kernels("triton").head_logits is reference.head_logits
    assert Kernels("xla").block_attention is reference.paged_attention
    with pytest.raises(AttributeError, match="matmul is not an op"):
        _ = Kernels().matmul
