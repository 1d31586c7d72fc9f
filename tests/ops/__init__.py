"""Tests of dflash_jax.ops."""
