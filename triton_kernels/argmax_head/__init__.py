"""argmax_head for CUDA."""

from ..call import argmax_head

__all__ = ["argmax_head"]
