"""Tests of dflash_jax.models."""
