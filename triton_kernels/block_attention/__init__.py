"""block_attention for CUDA."""

from ..call import paged_attention as block_attention

__all__ = ["block_attention"]
