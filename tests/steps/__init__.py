"""Tests ofdflash_jax.steps and the drafters"""
