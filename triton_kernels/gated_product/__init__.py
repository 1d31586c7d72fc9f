"""gated_product for CUDA."""

from ..call import gated_product

__all__ = ["gated_product"]
