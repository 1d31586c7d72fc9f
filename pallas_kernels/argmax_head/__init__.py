"""argmax_head for TPU."""

from ..heads import argmax_head

__all__ = ["argmax_head"]
