"""`python -m dflash_jax.train RECIPE --run FOLDER`: data, training and export, each going on where it stopped; with
`--eval` how good the draft is.

A command line, and so above the library's front: the chat template is handed down from here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_jax.errors import UserError

if TYPE_CHECKING:
    from dflash_jax.train.data import Part
    from dflash_jax.train.prompts import Encode
    from dflash_jax.train.recipe import Recipe

EXIT_USER_ERROR, EXIT_INTERRUPT = 2, 130
STAGES = ("data", "train", "all")
EVAL_OPTIONS = ("draft", "prompts", "count", "max_new_tokens")


def make_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m dflash_jax.train", allow_abbrev=False,
        description="Train a draft for a target, as a recipe says.",
    )  # fmt: skip
    p.add_argument("recipe", type=Path, help="TOML file, for example configs/train/smollm2-135m.toml")
    kept = "where data, checkpoints, metrics.jsonl and the draft go; what is there is gone on from"
    p.add_argument("--run", type=Path, required=True, metavar="FOLDER", help=kept)
    p.add_argument("--stage", choices=STAGES, help="what to do (default: all)")
    p.add_argument("--shards", metavar="I/N", help="with --stage data: write the shards whose number is I modulo N, so"
                   " that N processes with a GPU each share the work")  # fmt: skip
    p.add_argument("--token-map", type=int, metavar="N", help="keep the N tokens that answers have most beside the"
                   " run's draft: on CPU it then proposes only those, and is faster")  # fmt: skip
    p.add_argument("--stop-at", type=int, metavar="STEP", help="stop after this step; a later call goes on")
    group = p.add_argument_group("evaluation")
    group.add_argument("--eval", action="store_true", help="decode prompts with the run's draft, greedily and at"
                       " T = 1; print each category's mean acceptance, and keep it in FOLDER/eval*.json")  # fmt: skip
    group.add_argument("--draft", help="another draft than the run's own: folder, hub id or drafter")
    group.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL lines with prompt or messages, and category;"
                       " without it, the prompts that were held out")  # fmt: skip
    group.add_argument("--count", type=int, metavar="N", help="prompts at most, taken evenly (default: 100)")
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="tokens of a response (default: 96)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = make_parser().parse_args(argv)
    try:
        run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPT
    return 0


def run(args: argparse.Namespace) -> None:
    from dflash_jax.train.recipe import read_recipe
    from dflash_jax.train.run import DATA, DRAFT, Run, check_folder, write_data
    from dflash_jax.train.token_map import write_token_map

    check_options(args)
    recipe = read_recipe(args.recipe)
    check_folder(args.run)
    if args.eval:
        return run_eval(recipe, args)
    if args.token_map is not None:
        path, share = write_token_map(
            args.run / DATA, args.run / DRAFT, args.token_map, recipe.draft.selector_top_k or 1
        )  # fmt: skip
        return print(f"{path}: {share:.2%} of the tokens in answers", file=sys.stderr)
    if args.stop_at is not None and args.stop_at < 1:
        raise UserError(f"--stop-at must be at least 1, not {args.stop_at}")
    if args.stage != "data":
        recipe.train.check_start()
    if args.stage != "train":
        write_data(recipe, args.run, chat_encoder, None if args.shards is None else parse_part(args.shards))
    if args.stage != "data":
        Run(recipe, args.run).train(args.stop_at)
        print(f"the draft is in {args.run / DRAFT}", file=sys.stderr)


def check_options(args: argparse.Namespace) -> None:
    """UserError for options that mean nothing together."""
    wrong = ("stage", "shards", "stop_at", "token_map") if args.eval else EVAL_OPTIONS
    if given := _given(args, wrong):
        raise UserError(f"{' and '.join(given)} {'cannot go with' if args.eval else 'only go with'} --eval")
    if args.token_map is not None and (given := _given(args, ("stage", "shards", "stop_at"))):
        raise UserError(f"{' and '.join(given)} cannot go with --token-map")
    if args.shards is not None and args.stage != "data":
        raise UserError("--shards needs --stage data: training waits for all shards")


def _given(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]


def run_eval(recipe: Recipe, args: argparse.Namespace) -> None:
    from dflash_jax.train.evaluate import EvalConfig, evaluate, file_name, table

    config = EvalConfig(**{name: value for name in EVAL_OPTIONS if (value := getattr(args, name)) is not None})
    print(table(evaluate(recipe, args.run, config, chat_encoder)))
    print(f"kept in {args.run / file_name(config)}", file=sys.stderr)


def parse_part(text: str) -> Part:
    """`I/N` with 0 ≤ I < N."""
    from dflash_jax.train.data import Part

    index, _, count = text.partition("/")
    if not (index.isascii() and index.isdigit() and count.isascii() and count.isdigit() and int(index) < int(count)):
        raise UserError(f"--shards must be I/N with whole numbers 0 ≤ I < N, such as 0/4, not {text!r}")
    return Part(int(index), int(count))


def chat_encoder(target: str) -> Encode:
    """How the target's own chat template renders and encodes messages that wait for an answer."""
    from dflash_jax.text import encode_chat, load_tokenizer
    from dflash_jax.weights import open_target

    tokenizer = load_tokenizer(open_target(target).path)
    if tokenizer is None:
        raise UserError(f"target {target} has no tokenizer, which prompts of one's own need")
    return lambda messages: encode_chat(tokenizer, messages)


if __name__ == "__main__":
    sys.exit(main())
