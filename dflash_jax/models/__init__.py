"""Target families and the draft network."""

from dflash_jax.models.decoder import Hidden, Rows, embed, head_weight
from dflash_jax.models.family import Family
from dflash_jax.models.llama import LLAMA
from dflash_jax.models.qwen3 import QWEN3

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, QWEN3)}

__all__ = ["FAMILIES", "LLAMA", "QWEN3", "Family", "Hidden", "Rows", "embed", "head_weight"]
