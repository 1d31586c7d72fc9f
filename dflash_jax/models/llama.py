"""The Llama family: grouped-query attention, optional biases, RoPE with Llama-3 scaling, tied or untied head."""

from dflash_jax.models.decoder import decode_rows, decoder_specs
from dflash_jax.models.family import Family

LLAMA = Family(
    name="llama", specs=decoder_specs, forward=decode_rows, gguf_architecture="llama", gguf_permuted=True
)
