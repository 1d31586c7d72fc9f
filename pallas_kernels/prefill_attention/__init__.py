"""prefill_attention for TPU."""

from ..attention import paged_attention as prefill_attention

__all__ = ["prefill_attention"]
