"""`python -m dflash_jax.train RECIPE --run FOLDER`: data, training and export, each going on where it stopped."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash_jax.errors import UserError

EXIT_USER_ERROR, EXIT_INTERRUPT = 2, 130
STAGES = ("data", "train", "all")


def make_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m dflash_jax.train", allow_abbrev=False,
        description="Train a draft for a target, as a recipe says.",
    )  # fmt: skip
    p.add_argument("recipe", type=Path, help="TOML file, for example configs/train/smollm2-135m.toml")
    kept = "where data, checkpoints, metrics.jsonl and the draft go; what is there is gone on from"
    p.add_argument("--run", type=Path, required=True, metavar="FOLDER", help=kept)
    p.add_argument("--stage", choices=STAGES, default="all", help="what to do (default: %(default)s)")
    p.add_argument("--stop-at", type=int, metavar="STEP", help="stop after this step; a later call goes on")
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
    from dflash_jax.train.run import DRAFT, Run, check_folder, write_data

    recipe = read_recipe(args.recipe)
    check_folder(args.run)
    if args.stop_at is not None and args.stop_at < 1:
        raise UserError(f"--stop-at must be at least 1, not {args.stop_at}")
    if args.stage != "train":
        write_data(recipe, args.run)
    if args.stage != "data":
        Run(recipe, args.run).train(args.stop_at)
        print(f"the draft is in {args.run / DRAFT}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
