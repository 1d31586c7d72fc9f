"""Drafters by name: what `--draft NAME` and `--draft NAME:ARGUMENT` mean.

A name is looked up among those registered in this process, then among the entry points of installed packages (group
`dflash_jax.drafters`).  Anything else is the folder or hub id of a DFlash draft.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from dflash_jax.config import TargetConfig
from dflash_jax.config.draft import MAX_BLOCK_SIZE
from dflash_jax.drafters.dflash import DFlashDrafter
from dflash_jax.drafters.ngram import NgramDrafter
from dflash_jax.drafters.none import NoDrafter
from dflash_jax.drafters.protocol import Capabilities, Drafter
from dflash_jax.drafters.token_map import AUTO, NONE, add_token_map, find_token_map, has_token_map, read_token_map
from dflash_jax.errors import UserError
from dflash_jax.params import Params
from dflash_jax.weights import DraftCheckpoint, TargetCheckpoint, load_draft, open_draft
from dflash_jax.weights.turned import lay_out

ENTRY_POINTS = "dflash_jax.drafters"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


@dataclasses.dataclass(frozen=True)
class DraftContext:
    """What a factory gets.

    argument: the text after `NAME:`, "" without one; checkpoint: the opened target, whose weights have not been read;
    dtype: of weights and KV; mesh: where arrays go; block_size: the user's, None for the drafter's own choice;
    token_map: "auto", "none" or the file of tokens that may be drafted;
    weights_cache: folder for converted weights or None; progress: whether to show bars.
    """

    argument: str
    checkpoint: TargetCheckpoint
    dtype: Any
    mesh: Mesh
    block_size: int | None = None
    token_map: str | Path = AUTO
    weights_cache: Path | None = None
    progress: bool = False

    @property
    def target(self) -> TargetConfig:
        return self.checkpoint.config


DrafterFactory = Callable[[DraftContext], tuple[Drafter, Params]]
"""Makes a drafter and its read-only arrays (None without any), placed on the mesh.  UserError for a bad argument."""

_factories: dict[str, DrafterFactory] = {}


def register_drafter(name: str, factory: DrafterFactory, *, replace: bool = False) -> None:
    """Make `--draft NAME` mean what `factory` makes.

    ValueError for a name that is taken (unless `replace`) or is not made of a-z, 0-9, - and _.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"a drafter's name is made of a-z, 0-9, - and _, and {name!r} is not")
    if name in _factories and not replace:
        raise ValueError(f"a drafter named {name!r} is registered already")
    _factories[name] = factory


def drafter_names() -> list[str]:
    """All that can be asked for by name, sorted."""
    return sorted({*_factories, *importlib.metadata.entry_points(group=ENTRY_POINTS).names})


def make_drafter(draft: str, context: DraftContext) -> tuple[Drafter, Params]:
    """The drafter that `draft` (`NAME`, `NAME:ARGUMENT`, folder or hub id) asks for, checked, and its arrays.

    `context.argument` does not matter.  UserError for what cannot be had.
    """
    name, argument, factory = find_factory(draft)
    drafter, params = factory(dataclasses.replace(context, argument=argument))
    check_drafter(name, drafter, context.target)
    if context.token_map not in (AUTO, NONE) and not has_token_map(params):
        raise UserError(f"speculative_token_map {context.token_map} needs a DFlash draft, and draft is {draft!r}")
    check_block_size(context.block_size, drafter.max_block, name)
    return drafter, params


def find_factory(draft: str) -> tuple[str, str, DrafterFactory]:
    """(name, argument, factory) that `draft` stands for; a folder or hub id is an argument of `dflash`."""
    name, _, argument = draft.partition(":")
    factory = _factories.get(name) or _installed(name)
    if factory:
        return name, argument, factory
    if _NAME.fullmatch(name) and not Path(draft).expanduser().exists():
        known = ", ".join(drafter_names())
        raise UserError(f"draft {draft!r} is no drafter ({known}), no folder and no hub id (owner/name)")
    return "dflash", draft, _factories["dflash"]


def check_unused(draft: str, target: TargetConfig) -> None:
    """UserError for a draft that could not be had, as far as that shows without reading weights."""
    name, argument, _ = find_factory(draft)
    if name == "dflash" and argument:
        open_draft(argument, target)
    elif name == "ngram":
        ngram_sizes(argument)


def _installed(name: str) -> DrafterFactory | None:
    """The factory that an installed package offers under this name."""
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
        return entry.load()
    return None


# -- checks --------------------------------------------------------------------------------------------------------


def check_drafter(name: str, drafter: object, target: TargetConfig) -> None:
    """UserError, with all that is wrong, unless `drafter` keeps the protocol and fits the target."""
    if not isinstance(drafter, Drafter) or type(drafter).__hash__ is None:
        raise UserError(f"draft {name!r}: its factory made {drafter!r:.80}, which is not a hashable Drafter")
    if problems := list(_problems(drafter, target)):
        raise UserError(f"draft {name!r}: {'; '.join(problems)}")


def _problems(drafter: Drafter, target: TargetConfig) -> list[str]:
    needs, taps = drafter.capabilities, tuple(drafter.taps)
    checks = [
        (isinstance(needs, Capabilities), f"capabilities are {needs!r:.80}"),
        (_is_block(drafter.max_block), f"max_block {drafter.max_block!r:.80} is not one of 1 … {MAX_BLOCK_SIZE}"),
        (0 <= drafter.mask_id < target.vocab_size, f"mask_id {drafter.mask_id} is outside 0 … {target.vocab_size - 1}"),
        (all(0 <= tap < target.num_layers for tap in taps), f"taps {taps} are outside 0 … {target.num_layers - 1}"),
        (getattr(needs, "needs_hidden", None) == bool(taps), f"needs_hidden and taps {taps} contradict each other"),
    ]
    return [problem for holds, problem in checks if not holds]


def _is_block(rows: object) -> bool:
    return type(rows) is int and 1 <= rows <= MAX_BLOCK_SIZE


def check_block_size(asked: int | None, largest: int, name: str) -> None:
    """UserError unless blocks of `asked` rows are possible."""
    if asked is None:
        return
    if largest == 1:
        raise UserError(f"block_size {asked} needs a draft, and draft is {name!r}")
    if not 1 < asked <= largest:
        why = ", the block size that the draft was trained for" if name == "dflash" else f" of draft {name!r}"
        raise UserError(f"block_size {asked} is outside 2 … {largest}{why}")


# -- what comes with the package -----------------------------------------------------------------------------------


def make_none(context: DraftContext) -> tuple[Drafter, Params]:
    """`none`: plain decoding."""
    if context.argument:
        raise UserError(f"draft 'none' takes no argument, and {context.argument!r} is given")
    return NoDrafter(), None


def make_dflash(context: DraftContext) -> tuple[Drafter, Params]:
    """`dflash:PATH`: a DFlash draft from a folder or hub id, v1 or DFlash 2 by its configuration."""
    if not context.argument:
        raise UserError("draft 'dflash' needs a folder or hub id: dflash:PATH, or the path alone")
    opened = open_draft(context.argument, context.target)
    drafter = DFlashDrafter(opened.config)
    check_block_size(context.block_size, drafter.max_block, "dflash")  # before weights are read
    params = load_draft(opened, context.dtype, context.mesh, context.progress, context.weights_cache)
    return drafter, _with_token_map(lay_out(params, context.mesh, context.dtype), opened, context)


def _with_token_map(params: Params, opened: DraftCheckpoint, context: DraftContext) -> Params:
    path = find_token_map(context.token_map, opened.path, context.mesh.devices.flat[0].platform)
    if path is None:
        return params
    return add_token_map(params, read_token_map(path, context.target.vocab_size, opened.config.candidates))


def make_ngram(context: DraftContext) -> tuple[Drafter, Params]:
    """`ngram`, `ngram:MAX` or `ngram:MAX,MIN`: prompt look-up with these prompt_lookup_max and _min, in tokens."""
    longest, shortest = ngram_sizes(context.argument)
    check_block_size(context.block_size, MAX_BLOCK_SIZE, "ngram")
    return NgramDrafter(context.block_size or 8, longest, shortest), None


def ngram_sizes(argument: str) -> tuple[int, int]:
    """(prompt_lookup_max, prompt_lookup_min) out of `MAX,MIN`, either of which may be missing."""
    given = argument.split(",") if argument else []
    sizes = [int(text) if text.strip().isdecimal() else 0 for text in given]
    longest, shortest = [*sizes, *(4, 1)[len(sizes) :]][:2]
    if len(sizes) > 2 or not 1 <= shortest <= longest <= 16:
        raise UserError(f"draft 'ngram:{argument}' is not ngram:MAX or ngram:MAX,MIN with 1 ≤ MIN ≤ MAX ≤ 16")
    return longest, shortest


register_drafter("none", make_none)
register_drafter("dflash", make_dflash)
register_drafter("ngram", make_ngram)
