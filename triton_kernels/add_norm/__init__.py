"""add_norm for CUDA."""

from ..call import add_norm

__all__ = ["add_norm"]
