"""The dense Qwen3 family: as Llama, with an RMSNorm on every query and key head before RoPE.

The norm and the optional sliding layers come from the configuration (`qk_norm`, `windows`).
"""

from dflash_jax.models.decoder import decode_rows, decoder_specs
from dflash_jax.models.family import Family

QWEN3 = Family(
    name="qwen3", specs=decoder_specs, forward=decode_rows, gguf_architecture="qwen3", gguf_permuted=False
)
