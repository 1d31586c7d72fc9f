"""A draft's token map: the tokens that the target wrote most, which is what its draft need propose."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from dflash_jax.drafters.token_map import FILE
from dflash_jax.errors import UserError
from dflash_jax.train.data import load_shards


def write_token_map(data: Path, draft: Path, size: int, least: int) -> tuple[Path, float]:
    """The `size` most frequent tokens of the answers in `data`, kept beside the draft; also the share that they have.

    UserError without a draft, and for fewer tokens than the `least` that it chooses among.
    """
    if size < least:
        raise UserError(f"--token-map must be at least {least}, which the draft chooses among, not {size}")
    if not draft.is_dir():
        raise UserError(f"{draft} is not there: a token map belongs to a trained draft")
    learn, _ = load_shards(data)
    counts = np.bincount(np.concatenate([np.asarray(one.tokens[one.start :]) for one in learn]))
    ids = np.argsort(-counts, kind="stable")[:size]
    if (counts[ids] > 0).sum() >= least:  # else the file would be refused
        ids = ids[counts[ids] > 0]
    ids = np.sort(ids)
    path = draft / FILE
    path.write_text(json.dumps(ids.tolist(), separators=(",", ":")) + "\n", encoding="utf-8")
    return path, float(counts[ids].sum() / counts.sum())
