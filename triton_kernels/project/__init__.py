"""project for CUDA."""

from ..call import project

__all__ = ["project"]
