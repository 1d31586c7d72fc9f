"""project_add_norm for CUDA."""

from ..call import project_add_norm

__all__ = ["project_add_norm"]
