"""Named shapes of the ops, in one list: what is timed and tuned is also tested.

`REAL` holds what published pairs ask of an accelerator, `TINY` what a CPU test can afford.  Letters as in `axes`.
"""

from __future__ import annotations

import dataclasses

from dflash_jax.errors import UserError

VERIFY, DRAFT, PREFILL = "verify", "draft", "prefill"


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """What a model fixes: widths (ffn: of the MLP), heads, vocabulary, block size, and the draft's layers and taps.

    Target and draft are one shape where they have the same heads and width of MLP.
    """

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    block: int
    draft_layers: int
    taps: int
    qk_norm: bool = True  # of the target; a draft always has it
    candidates: int = 16  # of DFlash 2's selector

    @property
    def group(self) -> int:
        """R: query heads per key/value head."""
        return self.heads // self.kv_heads


@dataclasses.dataclass(frozen=True)
class Shape:
    """One launch: S requests of B rows each over at most `committed` tokens, in pages of `page_size` tokens.

    Every op of the launch takes its sizes from here.  `window` in tokens, None for full attention; each: all requests
    have as many tokens, not one of them.
    """

    model: ModelShape
    role: str
    requests: int
    rows: int
    committed: int
    page_size: int = 16
    window: int | None = None
    each: bool = False

    @property
    def name(self) -> str:
        """For example `qwen3-8b verify 8x16 over 2048`."""
        window = f" window {self.window}" if self.window else ""
        each = " each" if self.each else ""
        return f"{self.model.name} {self.role} {self.requests}x{self.rows} over {self.committed}{each}{window}"

    @property
    def causal(self) -> bool:
        """Drafts look both ways, targets back only."""
        return self.role != DRAFT

    @property
    def pages_per_slot(self) -> int:
        """W: pages that hold the committed tokens and the rows."""
        return -(-(self.committed + self.rows) // self.page_size)

    @property
    def num_pages(self) -> int:
        """P: those of all requests, and the padding page."""
        return self.requests * self.pages_per_slot + 1

    def lengths(self) -> tuple[int, ...]:
        """Committed tokens of each request: `committed`, or evenly spread up to it, which one of them has."""
        if self.each:
            return (self.committed,) * self.requests
        return tuple(self.committed * (i + 1) // self.requests for i in range(self.requests))


QWEN3_4B = ModelShape("qwen3-4b", 2560, 9728, 32, 8, 128, 151936, 16, 5, 5)
QWEN3_8B = ModelShape("qwen3-8b", 4096, 12288, 32, 8, 128, 151936, 16, 5, 5)
LLAMA_8B = ModelShape("llama-3.1-8b", 4096, 14336, 32, 8, 128, 128256, 10, 5, 5, qk_norm=False)
LLAMA_8B_DRAFT = dataclasses.replace(LLAMA_8B, ffn=12288)
SMOLLM2 = ModelShape("smollm2-135m", 576, 1536, 9, 3, 64, 49152, 8, 4, 4, qk_norm=False)
SMOLLM2_DRAFT = dataclasses.replace(SMOLLM2, kv_heads=9, ffn=896, candidates=64)
MODELS = (QWEN3_4B, QWEN3_8B, LLAMA_8B, SMOLLM2)


def _rounds(model: ModelShape, committed: int, draft: ModelShape | None = None) -> tuple[Shape, ...]:
    """Verify and draft passes of 1, 8 and 32 requests."""
    return tuple(
        Shape(of, role, requests, of.block, committed)
        for of, role in ((model, VERIFY), (draft or model, DRAFT))
        for requests in (1, 8, 32)
    )


def _prefills(model: ModelShape) -> tuple[Shape, ...]:
    """A first chunk alone, a later chunk alone, and a batch of first chunks."""
    return Shape(model, PREFILL, 1, 512, 0), Shape(model, PREFILL, 1, 512, 2048), Shape(model, PREFILL, 8, 512, 0)


REAL: tuple[Shape, ...] = (
    *_rounds(QWEN3_8B, 2048), *_prefills(QWEN3_8B),
    *(Shape(QWEN3_8B, VERIFY, requests, 16, 1000, each=True) for requests in (1, 8, 32)),
    Shape(QWEN3_8B, VERIFY, 32, 16, 4000, each=True),
    Shape(QWEN3_8B, VERIFY, 1, 16, 32768), Shape(QWEN3_8B, DRAFT, 1, 16, 32768),
    Shape(QWEN3_8B, DRAFT, 8, 16, 2048, window=512),
    *_rounds(LLAMA_8B, 2048, LLAMA_8B_DRAFT), *_prefills(LLAMA_8B),
    *_rounds(QWEN3_4B, 2048),
    *_rounds(SMOLLM2, 512, SMOLLM2_DRAFT), *_prefills(SMOLLM2),
)  # fmt: skip

# Every head dimension, group size and role of interest, with odd lengths, windows and page sizes.
_TINY_16 = ModelShape("tiny-16", 32, 80, 4, 4, 16, 61, 8, 2, 2)
_TINY_64 = ModelShape("tiny-64", 48, 136, 4, 2, 64, 97, 5, 3, 1, qk_norm=False)
TINY: tuple[Shape, ...] = (
    Shape(_TINY_16, VERIFY, 3, 8, 37),
    Shape(_TINY_16, DRAFT, 5, 8, 50, window=12),
    Shape(_TINY_64, VERIFY, 4, 5, 64, page_size=8, window=20),
    Shape(_TINY_64, DRAFT, 2, 5, 33),
    Shape(ModelShape("tiny-80", 40, 100, 4, 1, 80, 50, 4, 1, 3), DRAFT, 3, 4, 150),
    Shape(ModelShape("tiny-128", 64, 192, 3, 1, 128, 64, 16, 1, 2, qk_norm=False), VERIFY, 1, 16, 130, page_size=32),
    Shape(_TINY_16, PREFILL, 2, 24, 13, page_size=4),
)


def find(name: str) -> Shape:
    """The shape called `name`."""
    for shape in (*REAL, *TINY):
        if shape.name == name:
            return shape
    raise UserError(f"there is no shape {name!r} (known: {', '.join(shape.name for shape in (*REAL, *TINY))})")
