"""The retrace check must be able to fail, and the strict settings must be in force."""

from __future__ import annotations

import pytest
from conftest import MAPS, count_traces, too_many_maps

jax = pytest.importorskip("jax")
jnp = jax.numpy


def test_a_second_trace_fails_with_the_function_name(no_retrace):
    @jax.jit
    def doubled(x):
        return x + x

    short, long = jnp.ones(3), jnp.ones(4)
    doubled(short)
    with no_retrace() as counts:
        doubled(short)
    assert not counts
    with pytest.raises(pytest.fail.Exception, match="traced again: doubled 1 time "), no_retrace():
        doubled(long)


def test_limit_and_names_restrict_the_check(no_retrace):
    @jax.jit
    def tripled(x):
        return x + x + x

    x = jnp.ones(5)
    with no_retrace(limit=1, names=["tripled"]) as counts:
        tripled(x)
        jnp.ones(6)  # traced inside, but not named
    assert counts["tripled"] == 1
    with pytest.raises(pytest.fail.Exception, match="tripled 2 times"), no_retrace(limit=1, names=["tripled"]):
        tripled(jnp.ones(7))
        tripled(jnp.ones(8))


def test_an_error_inside_is_not_hidden_and_counting_stops(no_retrace):
    with pytest.raises(ZeroDivisionError), no_retrace():
        jax.jit(lambda x: x * 2)(jnp.ones(9))
        raise ZeroDivisionError
    with count_traces() as counts:
        pass
    jnp.ones(10)
    assert not counts


def test_strict_settings():
    assert len(jax.devices("cpu")) == 2
    with pytest.raises(ValueError, match="promotion"):
        jnp.add(jnp.ones(2, jnp.float32), jnp.ones(2, jnp.int32))
    with pytest.raises(ValueError, match="rank"):
        jnp.add(jnp.ones((2, 2)), jnp.ones(2))


@pytest.mark.skipif(not MAPS.exists(), reason="this system does not list a process's memory mappings")
def test_mappings_are_counted():
    assert too_many_maps(share=0) and not too_many_maps(share=1)
