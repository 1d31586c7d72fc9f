"""Tests of dflash_jax.aot."""
