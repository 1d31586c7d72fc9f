"""The options of `python -m dflash_jax.benchmark`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from dflash_jax.benchmark.load import Level, Sampling
from dflash_jax.benchmark.workloads import BUILT_IN
from dflash_jax.errors import UserError
from dflash_jax.text.prompts import shortened

DESCRIPTION = """\
Measures this engine with its draft, the same engine without one, and whatever else is named, on the same prompts in one
run: a table, one JSON file, and charts."""
EXAMPLES = """\
examples:
  python -m dflash_jax.benchmark
  python -m dflash_jax.benchmark --target Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 --workload gsm8k,humaneval \\
      --concurrency 1,4,8,16,32 --num-prompts 128 --output-len 1024
  python -m dflash_jax.benchmark --server vllm=http://localhost:8000 --server sglang=http://localhost:30000
  python -m dflash_jax.benchmark --preset qwen3-8b --synthetic-acceptance 6.5 --input-len 1000 --output-len 256
  python -m dflash_jax.benchmark compare before.json after.json
  python -m dflash_jax.benchmark round --preset smollm2-135m --requests 1,8
  python -m dflash_jax.benchmark kernels --shape smollm2

exit code: 0; 1 where a contender failed and the others' results were kept; 2 after a mistake; 130 after Ctrl-C or
SIGTERM, which keep what was measured"""
ENGINE = ("block_size", "speculation", "dtype", "tensor_parallel_size", "max_model_len", "kv_cache_bytes",
          "draft_sampling", "speculative_token_map")
DRAFT_ONLY = ("block_size", "draft_sampling", "speculative_token_map")  # what plain decoding has no use for
DEFAULTS = {"output_len": 48, "num_prompts": 10, "concurrency": "1,4", "repeats": 1, "seed": 0, "timeout": 120.0}


class Parser(argparse.ArgumentParser):
    """argparse's usage errors in the form of all others: one sentence, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{shortened(message, 200)} (--help lists the options)")


def make_parser(prog: str = "python -m dflash_jax.benchmark") -> Parser:
    p = Parser(prog=prog, usage="%(prog)s [OPTION …]", allow_abbrev=False, description=DESCRIPTION, epilog=EXAMPLES,
               formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    for title, add in GROUPS.items():
        add(p.add_argument_group(title))
    return p


def add_contenders(group: Any) -> None:
    group.add_argument("--target", metavar="T", help="folder, hub id or .gguf file (default: the demo model)")
    group.add_argument("--draft", metavar="D", action="append", help="a draft for it, folder, hub id or name; may be"
                       " repeated (default: with the demo model its own draft, or ngram while it has none; else"
                       " ngram)")  # fmt: skip
    group.add_argument("--kernels", metavar="K,K", default="auto", help="kernel backends, each measured (auto, xla,"
                       " pallas, triton, native; default: auto)")  # fmt: skip
    group.add_argument("--no-plain", dest="plain", action="store_false", help="leave plain decoding out, and with it"
                       " speed-ups and the comparison of tokens")  # fmt: skip
    group.add_argument("--no-engine", dest="engine", action="store_false", help="measure only what is named below")
    group.add_argument("--server", metavar="[NAME=]URL", action="append", default=[], help="an OpenAI-compatible or"
                       " SGLang server that serves the same target; may be repeated")  # fmt: skip
    group.add_argument("--server-api", choices=("auto", "openai", "sglang"), default="auto")
    group.add_argument("--server-model", metavar="M", help="name of the model there (default: the first it lists)")
    group.add_argument("--timeout", type=float, metavar="S", default=DEFAULTS["timeout"], help="seconds without a word"
                       " from a server that end its part (default: %(default)g)")  # fmt: skip
    group.add_argument("--reference", metavar="PYTHON", nargs="?", const="", help="the authors' torch reference,"
                       " package 'dflash', with its own plain decoding; PYTHON is an interpreter that has it (default:"
                       " this one)")  # fmt: skip


def add_workload(group: Any) -> None:
    group.add_argument("--workload", metavar="W,W", default=None, help="sets of prompts:"
                       f" {', '.join(BUILT_IN)}; gsm8k, math500, humaneval, mbpp, mt-bench, alpaca; or a JSONL file"
                       " (default: the first five)")  # fmt: skip
    group.add_argument("--input-len", type=int, metavar="N", help="prompts of N random tokens instead, with answers of"
                       " exactly --output-len")  # fmt: skip
    group.add_argument("--output-len", type=int, metavar="N", help=f"longest answer in tokens (default:"
                       f" {DEFAULTS['output_len']}; with --preset 256)")  # fmt: skip
    group.add_argument("--num-prompts", type=int, metavar="N", help="at each level (default:"
                       f" {DEFAULTS['num_prompts']}, or twice the largest concurrency)")  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", help="go on after end-of-text tokens")
    group.add_argument("--concurrency", metavar="N,N", help=f"requests at once (default: {DEFAULTS['concurrency']})")
    group.add_argument("--request-rate", metavar="R,R", help="requests a second instead, at random (Poisson)")
    group.add_argument("--repeats", type=int, metavar="N", default=DEFAULTS["repeats"], help="runs of each level; the"
                       " table has their median (default: %(default)s)")  # fmt: skip
    group.add_argument("--alternate", action="store_true", help="open all contenders at once and let them take turns at"
                       " each repeat, for machines whose speed changes; memory must do for all (an accelerator needs"
                       " --kv-cache-bytes)")  # fmt: skip


def add_sampling(group: Any) -> None:
    group.add_argument("--temperature", type=float, metavar="T", default=0.0, help="0 is greedy (default)")
    group.add_argument("--top-p", type=float, metavar="P", default=1.0)
    group.add_argument("--top-k", type=int, metavar="K", default=0)
    group.add_argument("--seed", type=int, metavar="N", default=DEFAULTS["seed"], help="of the choice of prompts,"
                       " arrivals and samples (default: 0)")  # fmt: skip


def add_execution(group: Any) -> None:
    group.add_argument("--block-size", type=int, metavar="N", help="tokens per block (default: the draft's own)")
    group.add_argument("--speculation", choices=("auto", "always"), help="'auto' (default) lets the engine choose each"
                       " round's width by what it measured; 'always' has whole blocks")  # fmt: skip
    group.add_argument("--draft-sampling", choices=("coupled", "argmax"))
    group.add_argument("--speculative-token-map", metavar="FILE", help="tokens that drafts may be; 'none': all")
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16"))
    group.add_argument("--platform", choices=("cpu", "gpu", "tpu"))
    group.add_argument("--tensor-parallel-size", type=int, metavar="N", help="devices that share the model (default:"
                       " 1)")  # fmt: skip
    group.add_argument("--max-model-len", type=int, metavar="N")
    group.add_argument("--kv-cache-bytes", type=int, metavar="N")
    group.add_argument("--prefix-caching", action="store_true", help="let prompts share what they have in common; off"
                       " by default, since repeats would find everything")  # fmt: skip


def add_synthetic(group: Any) -> None:
    group.add_argument("--preset", metavar="P", help="random weights of this shape (configs/models) instead of a"
                       " target; needs --synthetic-acceptance")  # fmt: skip
    group.add_argument("--synthetic-acceptance", type=float, metavar="A", help="tokens a round commits on average,"
                       " forced; every output says so; needs --preset")  # fmt: skip


def add_output(group: Any) -> None:
    group.add_argument("--output", metavar="DIR", help="folder for results.json and charts (default:"
                       " benchmark-results/DATE-TIME)")  # fmt: skip
    group.add_argument("--no-charts", dest="charts", action="store_false")
    group.add_argument("--no-split", dest="split", action="store_false", help="do not time the parts of a round")
    group.add_argument("--quiet", action="store_true", help="only errors on stderr")


GROUPS = {
    "who takes part": add_contenders, "what is asked, and how": add_workload, "sampling": add_sampling,
    "execution": add_execution, "random weights": add_synthetic, "output": add_output,
}  # fmt: skip


# -- what they say -----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    args = make_parser().parse_args(list(argv))
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """UserError for values and combinations that mean nothing."""
    for name, low in (("input_len", 1), ("output_len", 1), ("num_prompts", 1), ("repeats", 1)):
        value = getattr(args, name)
        if value is not None and value < low:
            raise UserError(f"{option(name)} must be at least {low}, not {value}")
    if not args.timeout > 0:
        raise UserError(f"--timeout must be above 0, not {args.timeout:g}")
    for one, other in (("workload", "input_len"), ("concurrency", "request_rate"), ("preset", "target"),
                       ("preset", "draft"), ("preset", "workload"), ("preset", "reference"),
                       ("preset", "speculative_token_map")):  # fmt: skip
        if getattr(args, one) is not None and getattr(args, other) is not None:
            raise UserError(f"{option(one)} and {option(other)} exclude each other")
    if args.alternate and args.reference is not None:
        raise UserError("--alternate and --reference exclude each other: the reference must be gone before JAX begins")
    if (args.preset is None) != (args.synthetic_acceptance is None):
        raise UserError("--preset and --synthetic-acceptance need each other: random weights accept nothing,"
                        " real ones need no forcing")  # fmt: skip
    if args.preset is not None and not args.engine:
        raise UserError("--preset is for this engine, and --no-engine leaves it out")
    if not args.engine and not args.server and args.reference is None:
        raise UserError("--no-engine leaves nobody: name a --server or the --reference")


def check_memory(args: argparse.Namespace, platform: str) -> None:
    """UserError where contenders that are open together would get what memory the others left."""
    if args.alternate and platform != "cpu" and args.kv_cache_bytes is None:
        raise UserError(f"--alternate on {platform} needs --kv-cache-bytes: by itself the first engine takes most"
                        " of the memory for its pools, and little is left for the next")  # fmt: skip


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def levels(args: argparse.Namespace) -> tuple[Level, ...]:
    if args.request_rate is not None:
        rates = numbers("--request-rate", args.request_rate, float)
        return tuple(Level(request_rate=rate) for rate in rates)
    counts = numbers("--concurrency", args.concurrency or str(DEFAULTS["concurrency"]), int)
    return tuple(Level(concurrency=count) for count in counts)


def numbers(name: str, text: str, kind: type) -> list[Any]:
    """Numbers above 0, separated by commas, each once."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{name} must be numbers separated by commas, not {shortened(repr(text))}") from None
    wrong = [one for one in found if not 0 < one < float("inf")]
    if wrong:
        raise UserError(f"{name} must be above 0, not {wrong[0]:g}")
    return list(dict.fromkeys(found))


def sampling(args: argparse.Namespace) -> Sampling:
    return Sampling(args.temperature, args.top_p, args.top_k, args.seed)


def engine_options(args: argparse.Namespace, most_at_once: int) -> dict[str, Any]:
    """Those of `EngineSettings` that are given, and those that a benchmark has of its own."""
    given = {name: getattr(args, name) for name in ENGINE if getattr(args, name) is not None}
    return given | {"max_running_requests": most_at_once, "enable_prefix_caching": args.prefix_caching}


def split_names(name: str, text: str) -> list[str]:
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise UserError(f"{name} has an empty name in {shortened(repr(text))}")
    return list(dict.fromkeys(found))
