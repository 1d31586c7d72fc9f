"""top_tokens for CUDA."""

from ..call import top_tokens

__all__ = ["top_tokens"]
