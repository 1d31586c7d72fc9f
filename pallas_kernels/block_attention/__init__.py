"""block_attention for TPU."""

from ..attention import paged_attention as block_attention

__all__ = ["block_attention"]
