"""accept_bonus for TPU."""

from ..rounds import accept_bonus

__all__ = ["accept_bonus"]
