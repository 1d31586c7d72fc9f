"""Which backend computes an op: what is asked for is had or refused, and what is chosen is said."""

from __future__ import annotations

import importlib.util

import pytest

from dflash_jax import UserError
from dflash_jax.ops import reference
from dflash_jax.ops.dispatch import OPS, Kernels, backends, interpreted, select
from dflash_jax.ops.kernel_packages import kernel_module, kernel_names


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> set[str]:
    """Those of triton and jax_triton that seem to be installed, with an XLA that takes kernels unless "no XLA"."""
    find, having = importlib.util.find_spec, set(request.param)

    def found(name: str) -> object:
        return (object() if name in having else None) if name in ("triton", "jax_triton") else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.delenv("DFLASH_JAX_TRITON", raising=False)
    refusal = "its compiler says no" if "no XLA" in having else None
    monkeypatch.setattr(kernel_module("triton", "launch"), "_xlas_refusal", lambda: refusal)
    return having


def test_kernels_bear_the_names_of_ops():
    for backend in ("triton", "pallas"):
        assert set(kernel_names(backend)) <= set(OPS)
        assert {"block_attention", "prefill_attention", "cache_write", "kv_inject"} <= set(kernel_names(backend))


@pytest.mark.parametrize(
    ("installed", "launched"),
    [(["triton"], "(launched by XLA)"), (["triton", "jax_triton"], "(launched by XLA)"),
     (["triton", "jax_triton", "no XLA"],
      "(launched by jax_triton, since XLA does not take them (its compiler says no))")],
    indirect=["installed"],
)  # fmt: skip
def test_auto_is_triton_on_cuda_where_it_can_be(installed: set[str], launched: str):
    chosen = select("auto", "gpu")
    assert chosen.backend == "triton" and backends("gpu") == ("xla", "triton")
    assert f"triton {launched} for" in chosen.reason and "block_attention" in chosen.reason
    assert "(auto; no faster: its prepare_block, accept_bonus, argmax_head" in chosen.reason
    assert "argmax_head" not in chosen.own_ops and "argmax_head" in select("triton", "gpu").own_ops


@pytest.mark.parametrize(
    ("installed", "lacking"), [([], "triton"), (["jax_triton"], "triton"), (["triton", "no XLA"], "jax_triton")],
    indirect=["installed"],
)  # fmt: skip
def test_auto_is_xla_on_cuda_without_what_triton_needs(installed: set[str], lacking: str):
    chosen = select("auto", "gpu")
    assert chosen.backend == "xla" and backends("gpu") == ("xla",)
    assert f"not triton: the package {lacking!r} is missing" in chosen.reason


def test_a_way_to_launch_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DFLASH_JAX_TRITON", "pigeon")
    for choice in ("auto", "triton"):
        with pytest.raises(UserError, match="DFLASH_JAX_TRITON='pigeon' is no way .* jax_triton, xla"):
            select(choice, "gpu")


@pytest.mark.parametrize("installed", [["triton", "jax_triton"]], indirect=True)
def test_on_cpu_it_is_xla(installed: set[str]):
    """If it is asked for; see test_native.py."""
    assert select("xla", "cpu").reason == "kernels: xla (asked for)" and select("xla", "cpu").own_ops == ()


def test_auto_is_pallas_on_tpu():
    chosen = select("auto", "tpu")
    assert chosen == Kernels("pallas") and backends("tpu") == ("xla", "pallas")
    assert "pallas for" in chosen.reason and "kv_inject" in chosen.reason and "(auto)" in chosen.reason


def test_pallas_is_interpreted_on_cpu_where_it_is_asked_for():
    chosen = select("pallas", "cpu")
    assert chosen == Kernels("pallas", interpret=True) != Kernels("pallas")
    assert "interpreted on cpu, which is slow and meant for tests" in chosen.reason
    assert interpreted("cpu") == ("pallas",) and interpreted("tpu") == interpreted("gpu") == ()


@pytest.mark.parametrize("installed", [[]], indirect=True)
@pytest.mark.parametrize(
    ("choice", "platform", "message"),
    [("cuda", "gpu", "kernels 'cuda' is not one of auto, xla, pallas, triton"),
     ("triton", "cpu", r"they run on gpu, and the platform is cpu \(available: xla(, native)?\)"),
     ("triton", "gpu", "the package 'triton' is missing: pip install"),
     ("pallas", "gpu", r"they run on tpu, and the platform is gpu \(available: xla\)")],
)  # fmt: skip
def test_what_cannot_be_had_is_refused(installed: set[str], choice: str, platform: str, message: str):
    with pytest.raises(UserError, match=message):
        select(choice, platform)


def test_an_op_without_a_kernel_is_the_reference_s():
    assert Kernels("triton").head_logits is reference.head_logits
    assert Kernels("xla").block_attention is reference.paged_attention
    with pytest.raises(AttributeError, match="matmul is not an op"):
        _ = Kernels().matmul
