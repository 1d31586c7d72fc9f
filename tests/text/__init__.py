"""Tests of tokenizers, chat templates and incremental decoding. No JAX, no network."""
