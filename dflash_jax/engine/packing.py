"""What the host hands to a step: Python rows as arrays, padded to shapes that are compiled.

Spare rows belong to the padding slot, which is finished for ever and owns only the padding page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_jax.engine.protocol import PrefillRow, TokenLogprobs
from dflash_jax.ops import FILTER, GREEDY, SAMPLE, EditRows, SamplingRows
from dflash_jax.sampling import MAX_LOGPROBS, SamplingParams
from dflash_jax.state import MAX_STOP_IDS, Needs
from dflash_jax.steps import Admission, PrefillBatch

SMALLEST_PREFILL = 16
MODES = (GREEDY, SAMPLE, FILTER)  # each serves what the ones before it do
INT32_MAX = 2**31 - 1  # more than any vocabulary or context
FLOAT32_SAFE = 1e30  # what is beyond this, or below its inverse, acts no otherwise, but would overflow in a product


def bucket(n: int, largest: int, smallest: int = 1) -> int:
    """The power of two that holds n, between `smallest` and `largest` (which need not be one)."""
    size = smallest
    while size < n:
        size *= 2
    return min(size, largest)


def buckets(largest: int, smallest: int = 1) -> list[int]:
    """All values `bucket` can take."""
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= 2
    return [*sizes, largest]


def prefill_buckets(max_rows: int, chunk: int) -> list[tuple[int, int]]:
    """(rows, width) that a launch of up to `max_rows` rows, together no wider than `chunk` tokens, can have."""
    rows, widths = buckets(max_rows), buckets(chunk, min(SMALLEST_PREFILL, chunk))
    fewest = dict(zip(rows, [1, *(n + 1 for n in rows)], strict=False))
    narrowest = dict(zip(widths, [1, *(n + 1 for n in widths)], strict=False))
    return [(n, width) for n in rows for width in widths if n == 1 or fewest[n] * narrowest[width] <= chunk]


def in_buckets(items: Sequence[Any], sizes: Sequence[int]) -> Iterator[tuple[Sequence[Any], int]]:
    """Parts of `items`, none longer than the largest size, and the smallest size that holds each."""
    for at in range(0, len(items), sizes[-1]):
        part = items[at : at + sizes[-1]]
        yield part, next(size for size in sizes if size >= len(part))


# -- rows as arrays ----------------------------------------------------------------------------------------------------
# The arrays are numpy's: JAX moves them to the device with the call.


@dataclass(frozen=True)
class Arrival:
    """A request that gets a slot."""

    slot: int
    limit_tokens: int
    pages: Sequence[int]
    stop_ids: Sequence[int]
    sampling: object
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()


def admission(arrivals: Sequence[Arrival], size: int, pages_per_slot: int, spare_slot: int) -> Admission:
    """`size` rows."""
    rows = [*arrivals, *[Arrival(spare_slot, 0, (), (), None)] * (size - len(arrivals))]
    return Admission(
        int32([row.slot for row in rows]),
        int32([row.limit_tokens for row in rows]),
        padded([row.stop_ids for row in rows], MAX_STOP_IDS, -1),
        padded([row.pages for row in rows], pages_per_slot, 0),
        sampling_rows([row.sampling for row in rows]),
    )


def sampling_rows(params: Sequence[object]) -> SamplingRows:
    """Parameters of requests as the device keeps them, a row each; what is not `SamplingParams` is greedy."""
    asked = [one if isinstance(one, SamplingParams) else SamplingParams() for one in params]
    seeds = [(one.seed or 0) % 2**64 for one in asked]
    return SamplingRows(
        temperature=float32([0 if one.greedy else min(one.temperature, FLOAT32_SAFE) for one in asked]),
        min_p=float32([one.min_p for one in asked]),
        top_k=int32([min(max(one.top_k, 0), INT32_MAX) for one in asked]),
        top_p=float32([one.top_p for one in asked]),
        seed=array([[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds], np.uint32),
    )


def needs_of(params: object) -> Needs:
    """What a request needs of a step."""
    if not isinstance(params, SamplingParams):
        return Needs()
    filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    mode = GREEDY if params.greedy else FILTER if filters else SAMPLE
    return Needs(mode, params.edits_logits, _alternatives(params.logprobs), _alternatives(params.prompt_logprobs))


def _alternatives(asked: int | None) -> int | None:
    """One number for whatever is asked: more alternatives cost next to nothing, another compiled step costs seconds."""
    return None if asked is None else MAX_LOGPROBS


def combined(needs: Iterable[Needs]) -> Needs:
    """What serves all of them, of few kinds: each is compiled anew for every bucket, and a process holds so many."""
    listed = list(needs)
    mode = max((one.mode for one in listed), key=MODES.index, default=GREEDY)
    edits = any(one.edits for one in listed)
    logprobs = max((one.logprobs for one in listed if one.logprobs is not None), default=None)
    after = max((one.prompt_logprobs for one in listed if one.prompt_logprobs is not None), default=None)
    if mode == SAMPLE and (edits or logprobs is not None):
        mode = FILTER  # which does what SAMPLE does, a little slower
    return Needs(mode, edits, logprobs, after)


def edit_row(arrival: Arrival, vocab_size: int) -> EditRows:
    """What a request that asks for it changes in its logits, as one row."""
    params = arrival.sampling
    assert isinstance(params, SamplingParams)
    return EditRows(
        active=array([True], bool),
        bias=_bias(params, vocab_size)[None],
        emitted=_counts(arrival.output_ids, vocab_size)[None],
        in_prompt=_counts(arrival.prompt_ids, vocab_size)[None] > 0,
        repetition=float32([max(params.repetition_penalty, 1 / FLOAT32_SAFE)]),
        presence=float32([params.presence_penalty]),
        frequency=float32([params.frequency_penalty]),
        stops_from=int32([min(len(arrival.prompt_ids) + params.min_tokens, INT32_MAX)]),
    )


def _counts(tokens: Sequence[int], vocab_size: int) -> Any:
    """int32 [V]: how often each token occurs."""
    return np.bincount(int32(tokens), minlength=vocab_size).astype(np.int32)


def _bias(params: SamplingParams, vocab_size: int) -> Any:
    """float32 [V]: −∞ where a token must not come."""
    bias = np.zeros(vocab_size, np.float32)
    for token, value in (params.logit_bias or {}).items():
        bias[token] = value
    if params.allowed_token_ids is not None:
        allowed = np.zeros(vocab_size, bool)
        allowed[list(params.allowed_token_ids)] = True
        bias[~allowed] = -np.inf
    bias[list(params.bad_token_ids)] = -np.inf
    return bias


def unpack_logprobs(packed: Any, count: int, n: int) -> list[list[TokenLogprobs]]:
    """What `packed_logprobs` made of `count` tokens a row: packed int32 [rows, count · (2 + 2n)]."""
    each = packed.reshape(len(packed), count, 2 + 2 * n)
    floats = np.ascontiguousarray(each).view(np.float32)
    columns = floats[..., 0], each[..., 1], each[..., 2 : 2 + n], floats[..., 2 + n :]
    lists = [column.tolist() for column in columns]
    return [[TokenLogprobs(*one) for one in zip(*row, strict=True)] for row in zip(*lists, strict=True)]


def table_updates(updates: Sequence[tuple[int, int, int]], size: int, spare_slot: int) -> Any:
    """int32 [size, 3] = (slot, index, page)."""
    return int32([*updates, *[(spare_slot, 0, 0)] * (size - len(updates))])


def prefill_batch(rows: Sequence[PrefillRow], size: int, width: int, spare_slot: int) -> PrefillBatch:
    """Rows padded to [size, width]; spare rows have no tokens."""
    rows = [*rows, *[PrefillRow(spare_slot, (), 0, False)] * (size - len(rows))]
    return PrefillBatch(
        padded([row.tokens for row in rows], width, 0),
        int32([row.slot for row in rows]),
        int32([row.start for row in rows]),
        int32([len(row.tokens) for row in rows]),
        array([row.last for row in rows], bool),
        allowed=all_masks([row.allowed for row in rows]),
        after=int32([row.after for row in rows]),
    )


def all_masks(masks: Sequence[Any], shape: tuple[int, ...] | None = None) -> Any:
    """uint32 [len(masks), …] of masks of one `shape`, where None allows everything.

    Without a shape it is that of those given; None where none is.
    """
    shape = shape or next((mask.shape for mask in masks if mask is not None), None)
    if shape is None:
        return None
    everything = np.full(shape, 0xFFFFFFFF, np.uint32)
    return np.stack([everything if mask is None else mask for mask in masks])


def padded(rows: Sequence[Sequence[int]], width: int, fill: int) -> Any:
    """int32 [len(rows), width]."""
    out = np.full((len(rows), width), fill, np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def array(values: Sequence[Any], dtype: Any) -> Any:
    return np.array(values, dtype)


def int32(values: Sequence[Any]) -> Any:
    return np.array(values, np.int32)


def float32(values: Sequence[Any]) -> Any:
    return np.array(values, np.float32)
