"""prepare_block for TPU."""

from ..rounds import prepare_block

__all__ = ["prepare_block"]
