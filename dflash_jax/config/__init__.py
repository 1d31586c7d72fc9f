"""Model configurations: frozen, hashable, read from JSON with errors that name file, key and value."""

from dflash_jax.config.draft import ConvConfig, DraftConfig, SelectorConfig, default_taps, read_draft
from dflash_jax.config.reading import Reader, read_json
from dflash_jax.config.rope import RopeConfig, inverse_frequencies, read_rope
from dflash_jax.config.shape import AttentionShape
from dflash_jax.config.target import TargetConfig, eos_ids, read_target

__all__ = [
    "AttentionShape", "ConvConfig", "DraftConfig", "Reader", "RopeConfig", "SelectorConfig", "TargetConfig",
    "default_taps", "eos_ids", "inverse_frequencies", "read_draft", "read_json", "read_rope", "read_target",
]  # fmt: skip
