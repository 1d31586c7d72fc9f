"""A run: who takes part, one after another or by turns; then the table, the JSON file and the charts."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import functools
import importlib.util
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from dflash_jax.benchmark import options, record
from dflash_jax.benchmark.ceiling import Rates, better, measure_rates
from dflash_jax.benchmark.contender import Contender
from dflash_jax.benchmark.encoding import Codec
from dflash_jax.benchmark.engine_contender import EngineContender, Served, serve_llm
from dflash_jax.benchmark.exactness import Difference, measure_gaps
from dflash_jax.benchmark.load import make_ask
from dflash_jax.benchmark.play import Outcome, Plan, add_ceilings, compare_with_plain, plain_answers, plain_of, play
from dflash_jax.benchmark.reference_contender import ReferenceContender, ReferenceOptions
from dflash_jax.benchmark.server_contender import ServerContender, ServerOptions
from dflash_jax.benchmark.synthetic import serve_preset
from dflash_jax.benchmark.workloads import BUILT_IN, IDS, Workload, length_workload, named_workload
from dflash_jax.demo import demo_draft_path, demo_target_path
from dflash_jax.drafters.registry import check_unused, find_factory
from dflash_jax.engine.build import choose_dtype
from dflash_jax.errors import UserError
from dflash_jax.llm import use_platform
from dflash_jax.ops import select
from dflash_jax.ops.dispatch import CHOICES
from dflash_jax.presets import load_preset
from dflash_jax.sharding import tensor_mesh
from dflash_jax.text import load_tokenizer
from dflash_jax.weights import TargetCheckpoint, open_target

log = logging.getLogger("dflash_jax")
SYNTHETIC_LENGTHS = 1000, 256  # prompt and answer of a preset, where nothing else is asked for


@dataclasses.dataclass
class Setting:
    """What the contenders have in common.  target: None where there is only a preset or a server."""

    args: argparse.Namespace
    plan: Plan
    target: str | None
    checkpoint: TargetCheckpoint | None
    codec: Codec
    drafts: list[str]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        mine = self.checkpoint.config.eos_token_ids if self.checkpoint else ()
        own = self.codec.tokenizer.eos_token_ids if self.codec.tokenizer else ()
        return tuple(dict.fromkeys((*mine, *own)))


def prepare(args: argparse.Namespace) -> Setting:
    """Everything that can be refused is refused here, before anything is loaded."""
    target, checkpoint = open_models(args)
    drafts = choose_drafts(args, checkpoint)
    codec = Codec(load_tokenizer(checkpoint.path)) if checkpoint else Codec()
    workload, count = make_workload(args, checkpoint)
    plan = Plan(workload, options.levels(args), count, args.repeats, options.sampling(args), args.split)
    return Setting(args, plan, target, checkpoint, codec, drafts)


def open_models(args: argparse.Namespace) -> tuple[str | None, TargetCheckpoint | None]:
    if args.preset is not None or (args.target is None and not args.engine and args.reference is None):
        return None, None
    target = args.target if args.target is not None else str(demo_target_path(progress=not args.quiet))
    return target, open_target(target)


def choose_drafts(args: argparse.Namespace, checkpoint: TargetCheckpoint | None) -> list[str]:
    """Drafts to measure, checked as far as that goes without reading weights."""
    if checkpoint is None:
        return []
    shipped = demo_draft_path() if args.target is None else None
    drafts = list(dict.fromkeys(args.draft or [str(shipped) if shipped else "ngram"]))
    for draft in drafts:
        check_unused(draft, checkpoint.config)
    return [draft for draft in drafts if draft != "none"]


def make_workload(args: argparse.Namespace, checkpoint: TargetCheckpoint | None) -> tuple[Workload, int]:
    """The workload, and how many of its prompts each level takes."""
    most = max(level.concurrency or 1 for level in options.levels(args))
    count = args.num_prompts or max(int(options.DEFAULTS["num_prompts"]), 2 * most)
    if args.input_len is None and args.preset is None:
        names = options.split_names("--workload", args.workload) if args.workload else BUILT_IN
        length = args.output_len or int(options.DEFAULTS["output_len"])
        return named_workload(names, length, args.ignore_eos, args.seed), count
    inputs, outputs = args.input_len or SYNTHETIC_LENGTHS[0], args.output_len or SYNTHETIC_LENGTHS[1]
    vocab = checkpoint.config.vocab_size if checkpoint else preset_vocab(args.preset)
    return length_workload(inputs, outputs, count, args.seed, vocab), count


def preset_vocab(preset: str | None) -> int:
    if preset is None:
        return IDS
    shape = load_preset(preset)
    if "target" not in shape:
        raise UserError(f"preset {preset!r} is a machine, not a pair of models")
    return int(shape["target"]["vocab_size"])


# -- who takes part ----------------------------------------------------------------------------------------------------


def contenders(setting: Setting) -> list[Contender]:
    """In the order of their turns: the reference first, because JAX keeps the device once it has it."""
    return [*references(setting), *engines(setting), *servers(setting)]


def engines(setting: Setting) -> list[Contender]:
    args = setting.args
    if not args.engine:
        return []
    backends = options.split_names("--kernels", args.kernels)
    if wrong := [name for name in backends if name not in CHOICES]:
        raise UserError(f"kernels {wrong[0]!r} is not one of {', '.join(CHOICES)}")
    found: list[Contender] = []
    for draft in ["none"] * args.plain + (setting.drafts or ["DFlash"] * (args.preset is not None)):
        for backend in backends:
            name = "plain" if draft == "none" else f"dflash_jax {short(draft)}"
            found.append(make_engine(setting, name + (f" ({backend})" if len(backends) > 1 else ""), draft, backend))
    return found


def make_engine(setting: Setting, name: str, draft: str, backend: str) -> EngineContender:
    args, engine = setting.args, options.engine_options(setting.args, setting.plan.most_at_once) | {"kernels": backend}
    if draft == "none":
        engine = {key: value for key, value in engine.items() if key not in options.DRAFT_ONLY}
    elif find_factory(draft)[0] != "dflash":
        engine.pop("speculative_token_map", None)
    if args.preset is None:
        return EngineContender(name, functools.partial(serve_llm, setting.target, draft, args.platform, **engine))
    mean = args.synthetic_acceptance if draft != "none" else None
    make = functools.partial(serve_preset, args.preset, mean, draft != "none", args.platform, engine)
    how = "random weights" if mean is None else f"synthetic {mean:g}"
    return EngineContender(f"{name} ({how})", make, mean)


def references(setting: Setting) -> list[Contender]:
    """With each DFlash draft, and its own plain decoding."""
    args = setting.args
    if args.reference is None:
        return []
    drafts = [draft for draft in setting.drafts if find_factory(draft)[0] == "dflash"]
    if not drafts:
        raise UserError("--reference needs a DFlash draft: name one with --draft")
    assert setting.checkpoint is not None
    common = {"target": str(setting.checkpoint.path), "python": reference_python(args.reference),
              "dtype": args.dtype or "auto", "platform": args.platform}  # fmt: skip
    found: list[Contender] = []
    for draft in drafts:
        each = {"reference plain": 1} if not found else {}
        for name, block in {**each, f"reference {short(draft)}": args.block_size}.items():
            asked = ReferenceOptions(draft=draft.removeprefix("dflash:"), block_size=block, **common)
            found.append(ReferenceContender(name, asked, setting.codec, setting.stop_ids))
    return found


def reference_python(asked: str) -> str:
    """The interpreter that runs the reference: the one asked for, or this one, if it has the package."""
    if asked:
        if shutil.which(asked) is None:
            raise UserError(f"--reference {asked} is no program")
        return asked
    if importlib.util.find_spec("dflash") is None:
        raise UserError("--reference needs the package 'dflash', which this Python has not: name one that has it")
    return sys.executable


def servers(setting: Setting) -> list[Contender]:
    args = setting.args
    found = [server_options(text, args) for text in args.server]
    names = [one.name for one in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--server has the name {twice[0]} twice: give names, NAME=URL")
    return [ServerContender(one, setting.codec) for one in found]


def server_options(text: str, args: argparse.Namespace) -> ServerOptions:
    name, mark, url = text.partition("=")
    if not mark or "/" in name:
        name, url = text.partition("://")[2] or text, text
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--server {text!r} is no URL: it must begin with http:// or https://")
    return ServerOptions(name.strip("/"), url, args.server_api, args.server_model, args.timeout)


def short(draft: str) -> str:
    return PurePath(draft).name if "/" in draft else draft


# -- the run -----------------------------------------------------------------------------------------------------------


def run(argv: Sequence[str]) -> int:
    from dflash_jax.benchmark.report import publish

    args = options.parse(argv)
    configure_logging(args.quiet)
    folder = Path(args.output or Path("benchmark-results") / datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S"))
    setting = prepare(args)
    everyone = contenders(setting)
    record.check_folder(folder)
    stage = Stage(setting)
    try:
        stage.play_all(everyone)
    finally:  # Ctrl-C too keeps what there is
        if stage.has_figures:
            publish(stage.document(argv), folder, args.charts)
    failed = [outcome.error for outcome in stage.outcomes if outcome.error]
    if not stage.has_figures:
        raise UserError("; ".join(failed) or "nobody could be measured at any of these levels")
    return 1 if failed else 0


class Stage:
    """Where contenders take their turns; remembers what became of each."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.outcomes: list[Outcome] = []
        self.rates: Rates | None = None

    def play_all(self, everyone: Sequence[Contender]) -> None:
        try:
            for some in [everyone] if self.setting.args.alternate else [[one] for one in everyone]:
                if self.rates is None and any(isinstance(one, EngineContender) for one in some):
                    self._check_choices()
                    self._measure_rates()
                outcomes = [Outcome(one.name) for one in some]
                self.outcomes += outcomes
                asyncio.run(play(some, self.setting.plan, outcomes))
        finally:
            compare_with_plain(self.outcomes, self.setting.args.preset is not None)
        if self.rates is not None:
            self._measure_rates()
        self._look_at_differences()

    @property
    def has_figures(self) -> bool:
        return any(outcome.levels for outcome in self.outcomes)

    def _check_choices(self) -> None:
        """What cannot be had on this machine ends the run before it begins."""
        import jax

        args = self.setting.args
        use_platform(args.platform)
        platform, mesh = jax.default_backend(), tensor_mesh(args.tensor_parallel_size or 1)
        options.check_memory(args, platform)
        for backend in options.split_names("--kernels", args.kernels):
            select(backend, platform, mesh)

    def _measure_rates(self) -> None:
        """While no engine fills the device: before the first, and after the last."""
        import jax

        dtype = choose_dtype(self.setting.args.dtype or "auto", jax.default_backend())
        self.rates = better(self.rates, measure_rates(dtype))

    def _look_at_differences(self) -> None:
        """Open plain decoding once more where somebody's tokens are not its own."""
        plain = plain_of(self.outcomes)
        found: list[Difference] = [d for one in self.outcomes for level in one.levels for d in level.differences]
        if plain is None or not found or self.setting.target is None:
            return
        plan, args = self.setting.plan, self.setting.args
        items = plan.workload.take(plan.num_prompts)
        asks = {item.key: make_ask(item, 0, item.prompt, plan.sampling) for item in items}
        engine = options.engine_options(args, 1) | {"kernels": plain.facts["kernels"]}
        engine = {key: value for key, value in engine.items() if key not in options.DRAFT_ONLY}
        served: Served = serve_llm(self.setting.target, "none", args.platform, **engine)
        measure_gaps(served, asks, plain_answers(plain), found)

    def document(self, argv: Sequence[str]) -> dict[str, Any]:
        args, plan = self.setting.args, self.setting.plan
        add_ceilings(self.outcomes, self.rates)
        return {
            **record.head(argv, with_device=self.rates is not None),
            "synthetic_acceptance": args.synthetic_acceptance,
            "target": f"random weights of shape {args.preset}" if args.preset else short(self.setting.target or "?"),
            "options": {key: _plain_value(value) for key, value in vars(args).items()},
            "workload": {"name": plan.workload.name, "sha256": plan.workload.sha256, "prompts": plan.num_prompts,
                         "available": len(plan.workload.items), "repeats": plan.repeats,
                         "sampling": dataclasses.asdict(plan.sampling)},
            "rates": self.rates and dataclasses.asdict(self.rates),
            "results": [outcome.as_json() for outcome in self.outcomes],
        }  # fmt: skip


def _plain_value(value: Any) -> Any:
    return [record.without_folder(one) for one in value] if isinstance(value, list) else record.without_folder(value)


def configure_logging(quiet: bool) -> None:
    log.handlers[:] = [logging.StreamHandler(sys.stderr)]
    log.setLevel(logging.ERROR if quiet else logging.INFO)
