"""A drafter of one's own, registered from outside the package.

It drafts by a table: after token t comes table[t].  That is a poor language model, and still the output is exactly the
target's, because every draft is checked; only the acceptance shows how good the table is.

    python examples/custom_drafter.py
    python examples/custom_drafter.py --target Qwen/Qwen3-0.6B --prompt "Once upon a time"
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from dflash_jax import LLM, SamplingParams, UserError
from dflash_jax.drafters import Capabilities, DraftContext, Drafter, Weights, register_drafter
from dflash_jax.models import Rows
from dflash_jax.sharding import sharding

TINY = Path(__file__).resolve().parents[1] / "tests" / "data" / "pairs" / "x-v2-one-layer" / "target"


# -- the drafter -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TableDrafter:
    """Proposes table[bonus], table[table[bonus]], …  `weights.draft` is the table, int32 [V].

    The dataclass holds what is static; it is hashable, so that compiled rounds are kept by it.
    """

    max_block: int = 6
    capabilities = Capabilities()  # no hidden states, nothing from the host
    mask_id = 0  # what the rows to fill hold before `draft`; this drafter does not look
    taps = ()

    def page_bytes(self, page_size: int, dtype: Any) -> int:
        return 0

    def init_cache(self, num_pages: int, page_size: int, dtype: Any, mesh: Mesh) -> tuple[()]:
        return ()

    def draft(self, weights: Weights, cache: Any, rows: Rows) -> Array:
        tokens = [rows.ids[:, 0]]
        for _ in range(rows.ids.shape[1] - 1):  # a round may be narrower than max_block
            tokens.append(weights.draft[tokens[-1]])
        return jnp.stack(tokens[1:], axis=1)

    def absorb(self, weights: Weights, cache: Any, taps: Array, rows: Rows) -> Any:
        return cache


def make_table_drafter(context: DraftContext) -> tuple[Drafter, Array]:
    """The factory behind `--draft table:FILE`; FILE is a JSON list with a token id for each token id."""
    table = json.loads(Path(context.argument).read_text(encoding="utf-8"))
    if len(table) != context.target.vocab_size:
        raise UserError(f"{context.argument} has {len(table)} entries, and the target {context.target.vocab_size} ids")
    everywhere = sharding(context.mesh, (None,))
    return TableDrafter(context.block_size or 6), jax.device_put(jnp.asarray(table, jnp.int32), everywhere)


register_drafter("table", make_table_drafter)


# -- using it ----------------------------------------------------------------------------------------------------------


def learn_table(texts: Iterable[Sequence[int]], vocab_size: int) -> list[int]:
    """For each token what followed it most often; itself where it was never seen."""
    seen: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for ids in texts:
        for token, following in zip(ids, ids[1:], strict=False):
            seen[token][following] += 1
    return [seen[token].most_common(1)[0][0] if token in seen else token for token in range(vocab_size)]


def main(argv: Sequence[str] | None = None) -> list[int]:
    """Decode plainly, learn a table from that, decode the same with the table; returns the acceptance."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default=str(TINY))
    parser.add_argument("--prompt", help="a text; default: a few token ids")
    parser.add_argument("--max-new-tokens", type=int, default=60)
    args = parser.parse_args(argv)
    prompt = args.prompt or [5, 17, 40, 3]
    params = SamplingParams(max_new_tokens=args.max_new_tokens, ignore_eos=True)
    options: dict[str, Any] = {"max_running_requests": 1, "max_model_len": 256, "chunked_prefill_size": 16}

    plain = LLM(args.target, "none", **options)
    [expected] = plain.generate([prompt], params)
    text = [*expected.prompt_token_ids, *expected.token_ids]
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.json"
        table.write_text(json.dumps(learn_table([text], plain.engine.loaded.config.vocab_size)), encoding="utf-8")
        [out] = LLM(args.target, f"table:{table}", **options).generate([prompt], params)
    if out.token_ids != expected.token_ids:
        raise SystemExit("the output has changed, which no drafter can do: this is a bug in dflash_jax")
    print(f"{len(out.token_ids)} tokens in {out.rounds} rounds; accepted: {out.accept_lengths}")
    return out.accept_lengths


if __name__ == "__main__":
    main()
