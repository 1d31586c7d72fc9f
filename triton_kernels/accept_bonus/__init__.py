"""accept_bonus for CUDA."""

from ..call import accept_bonus

__all__ = ["accept_bonus"]
