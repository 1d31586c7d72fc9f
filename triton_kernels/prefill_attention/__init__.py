"""prefill_attention for CUDA."""

from ..call import paged_attention as prefill_attention

__all__ = ["prefill_attention"]
