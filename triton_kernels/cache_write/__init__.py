"""cache_write for CUDA."""

from ..call import cache_write

__all__ = ["cache_write"]
