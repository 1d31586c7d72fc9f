"""Tests of the engine's host side, against a device that can be worked out by hand. No JAX."""
