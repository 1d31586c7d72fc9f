"""Drafters: the protocol, those that come with the package, and the registry for others (docs/DRAFTERS.md)."""

from dflash_jax.drafters.dflash import DFlashDrafter
from dflash_jax.drafters.ngram import NgramDrafter
from dflash_jax.drafters.none import NoDrafter
from dflash_jax.drafters.protocol import Capabilities, Drafter, Weights
from dflash_jax.drafters.registry import DraftContext, DrafterFactory, drafter_names, make_drafter, register_drafter

__all__ = [
    "Capabilities", "DFlashDrafter", "DraftContext", "Drafter", "DrafterFactory", "NgramDrafter", "NoDrafter",
    "Weights", "drafter_names", "make_drafter", "register_drafter",
]  # fmt: skip
