"""The tokens a draft may propose, where they are fewer than the vocabulary: the speculative token map of SGLang.

After FR-Spec (arXiv:2502.14856): the head is what a small draft spends most of its time on, and most of its rows are
for tokens that hardly ever come.  A token that is left out is never drafted; the target still writes it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from dflash_jax.drafters.protocol import Weights
from dflash_jax.errors import UserError
from dflash_jax.models import head_weight
from dflash_jax.ops import Turned
from dflash_jax.params import Params

log = logging.getLogger("dflash_jax")

FILE = "token_map.json"  # beside a draft's weights
AUTO, NONE = "auto", "none"
KEY = "token_map"  # in a draft's parameters


def find_token_map(asked: str | Path, folder: Path, platform: str) -> Path | None:
    """The file that `asked` names; for "auto" the draft's own, if it has one, on CPU.

    On accelerators the head's rows cost less than the acceptance that is lost with them.
    """
    if asked == NONE or (asked == AUTO and platform != "cpu"):
        return None
    if asked == AUTO:
        return folder / FILE if (folder / FILE).is_file() else None
    try:
        return Path(asked).expanduser()
    except RuntimeError as error:  # the home of a user who is not there
        raise UserError(f"speculative_token_map {asked}: {error}") from error


def read_token_map(path: Path, vocab_size: int, least: int) -> np.ndarray:
    """The token ids int32 [K] in a JSON list, ascending.

    UserError for what is no such list, ids outside the vocabulary, or fewer than `least` of them.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the token map {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the token map {path} is not JSON: {error}") from error
    if not isinstance(found, list) or not all(type(one) is int for one in found):
        raise UserError(f"the token map {path} is not a list of token ids")
    outside = [one for one in found if not 0 <= one < vocab_size]
    if outside:
        raise UserError(f"the token map {path} names token {outside[0]}, outside 0 … {vocab_size - 1}")
    ids = np.unique(np.array(found, np.int32))  # ascending: of equals the draft takes the first, as of all tokens
    if len(ids) < least:
        raise UserError(f"the token map {path} has {len(ids)} tokens, and the draft chooses among {least}")
    log.info("drafts are chosen among %d of %d tokens (%s)", len(ids), vocab_size, path.name)
    return ids


def has_token_map(params: Params) -> bool:
    return isinstance(params, dict) and KEY in params


def map_size(params: Params) -> int | None:
    """Tokens of a draft's map; None: it has none."""
    return len(params[KEY]["ids"]) if has_token_map(params) else None


def with_heads(weights: Weights) -> Weights:
    """`weights`, and if the draft has a token map, the rows of the target's head for it."""
    if not has_token_map(weights.draft):
        return weights
    ids, head = weights.draft[KEY]["ids"], head_weight(weights.target)
    rows = dataclasses.replace(head, array=head.array[ids]) if isinstance(head, Turned) else head[ids]
    return weights._replace(draft={**weights.draft, KEY: {"ids": ids, "head": rows}})


def chosen_head(weights: Weights, likeliest: bool) -> tuple[Any, Array | None]:
    """The head [K, H] to draft with, and the ids int32 [K] of its rows (None: all tokens in order).

    likeliest: whether the likeliest token is all that is wanted.  Where a request samples or changes logits, all tokens
    count: the noise often picks an unlikely one.
    """
    few = weights.draft[KEY] if likeliest and has_token_map(weights.draft) else None
    return (few["head"], few["ids"]) if few else (head_weight(weights.target), None)


def named(ids: Array | None, places: Array) -> Array:
    """Token ids int32 of `places` in the head of `chosen_head`."""
    return places if ids is None else ids[places]


def add_token_map(params: Params, ids: np.ndarray) -> Params:
    """A draft's parameters with the map, which `with_heads` completes."""
    return {**params, KEY: {"ids": jnp.asarray(ids)}}
