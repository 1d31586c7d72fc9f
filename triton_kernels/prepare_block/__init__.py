"""prepare_block for CUDA."""

from ..call import prepare_block

__all__ = ["prepare_block"]
