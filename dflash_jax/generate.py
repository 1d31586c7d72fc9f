"""`python -m dflash_jax.generate`: text from a prompt, with a draft or without.

Text (or with --json one object per prompt) goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from math import isfinite
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from dflash_jax import options
from dflash_jax.errors import UserError
from dflash_jax.text.prompts import Named, check_text, parse_ids, read_prompts_file, shortened

if TYPE_CHECKING:
    from dflash_jax.llm import LLM, Job, RequestOutput
    from dflash_jax.logprobs import Logprob

log = logging.getLogger("dflash_jax")

EXIT_USER_ERROR = 2
EXIT_SIGNAL = 128  # plus the number of the signal: 130 for Ctrl-C
DESCRIPTION = """\
Text from a prompt, decoded by a target model whose steps a small draft model shortens; the output is the target's own.
Text streams to stdout and a summary follows on stderr; with --json stdout gets one object per prompt."""
EXAMPLES = """\
examples:
  python -m dflash_jax.generate "Why is the sky blue?"
  python -m dflash_jax.generate --target Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16 "Name three fruits."
  python -m dflash_jax.generate --prompts-file prompts.jsonl --json > results.jsonl

exit code: 0, 2 after an error, 130 after Ctrl-C (the text so far is kept)"""


class Parser(argparse.ArgumentParser):
    """argparse's usage errors in the form of all others: one sentence, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{shortened(message, 200)} (--help lists the options)")

    def print_help(self, file: Any = None) -> None:
        write(self.format_help())


def make_parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m dflash_jax.generate", usage="%(prog)s [OPTION …] [PROMPT …]", allow_abbrev=False,
        description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("prompts", nargs="*", metavar="PROMPT", help="text; several prompts run together")
    for title, add in options.GROUPS.items():
        add(p.add_argument_group(title))
    output = p.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object per prompt (with --n: per sample) on"
                        " stdout, nothing else there")  # fmt: skip
    output.add_argument("--quiet", action="store_true", help="only errors on stderr: no progress, no summary")
    return p


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Options and prompts in any order; after `--` all is prompts, whatever it looks like."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    args = make_parser().parse_intermixed_args(words[:end])
    args.prompts += words[end + 1 :]
    return args


# -- prompts -----------------------------------------------------------------------------------------------------------


def read_prompts(args: argparse.Namespace) -> list[Named]:
    """Prompts from the command line, in the order: arguments, ids, file."""
    prompts: list[Any] = [*args.prompts, *map(parse_ids, args.prompt_ids or ())]
    names = ["the prompt"] if len(prompts) == 1 else [f"prompt {i}" for i in range(1, len(prompts) + 1)]
    found = [*zip(names, prompts, strict=True)]
    if args.prompts_file is not None:
        found += read_prompts_file(args.prompts_file)
    if not found:
        raise UserError("no prompt is given: pass one as an argument, or use --prompts-file or --prompt-ids")
    for name, prompt in found:
        if isinstance(prompt, str):
            check_text(name, prompt)
    return found


def with_template(llm: LLM, prompt: Any, args: argparse.Namespace) -> Any:
    """A text becomes a user message when the tokenizer has a chat template, unless --raw; --system goes first."""
    if isinstance(prompt, str) and not args.raw and llm.tokenizer and llm.tokenizer.chat_template is not None:
        prompt = [{"role": "user", "content": prompt}]
    if args.system is None:
        return prompt
    if isinstance(prompt, str):
        reason = "--raw is given" if args.raw else f"target {llm.target} has none"
        raise UserError(f"--system needs a chat template, and {reason}")
    if not isinstance(prompt[0], dict):
        raise UserError("--system needs prompts of text or messages, and token ids are given")
    return prompt if prompt[0].get("role") == "system" else [{"role": "system", "content": args.system}, *prompt]


# -- a run -------------------------------------------------------------------------------------------------------------


def load_llm(args: argparse.Namespace) -> LLM:
    from dflash_jax.llm import LLM

    bars = not args.quiet and sys.stderr is not None and sys.stderr.isatty()  # elsewhere, bars are a flood of lines
    return LLM(args.target, args.draft, platform=args.platform, progress=bars, **options.engine_options(args))


class Printer:
    """Shows jobs in the order of the prompts: the first unfinished one streams, later ones wait their turn."""

    def __init__(self, llm: LLM, originals: Sequence[Any], jobs: Sequence[Job], as_json: bool):
        self.llm = llm
        self.originals = originals
        self.jobs = jobs
        self.as_json = as_json
        self.turn = 0
        self._headed = 0  # jobs whose heading has been written

    def show(self) -> None:
        """Print what is new."""
        while self.turn < len(self.jobs):
            job = self.jobs[self.turn]
            if not self.as_json:
                self._head(job)
                write(job.new_text() if job.stream else job.new_ids())
            if not job.finished:
                return
            self._end(job)
            self.turn += 1

    def _head(self, job: Job) -> None:
        """Which sample follows, where there are several."""
        if len(job.siblings) > 1 and self._headed == self.turn:
            write(f"--- {job.name} ---\n")
        self._headed = self.turn + 1

    def _end(self, job: Job) -> None:
        if self.as_json:
            write(json.dumps(self.record(job), ensure_ascii=False) + "\n")
        else:
            write("\n" if self.turn + 1 == len(self.jobs) else "\n\n")

    def record(self, job: Job) -> dict[str, Any]:
        out = job.output()
        return {
            "prompt": self.originals[self.turn],
            **({"index": out.index} if len(job.siblings) > 1 else {}),
            "prompt_tokens": len(out.prompt_token_ids),
            "token_ids": out.token_ids,
            "text": out.text,
            "finish_reason": out.finish_reason,
            "rounds": out.rounds,
            "accept_lengths": out.accept_lengths,
            "mean_accept_length": out.mean_accept_length,
            "time_to_first_token_s": out.time_to_first_token_s,
            "decode_s": out.decode_s,
            "tokens_per_s": out.tokens_per_s,
            "target": self.llm.target,
            "draft": self.llm.draft,
            "dtype": self.llm.dtype,
            "platform": self.llm.platform,
            **({} if out.seed is None else {"seed": out.seed}),
            **logprob_records(job, out),
        }


def logprob_records(job: Job, out: RequestOutput) -> dict[str, Any]:
    """The keys for what was asked for: an object for each token, null for the prompt's first."""
    found: dict[str, Any] = {}
    if out.logprobs is not None:
        found["logprobs"] = token_records(out.token_ids, out.logprobs, job.params.logprobs)
    if out.prompt_logprobs is not None:
        found["prompt_logprobs"] = token_records(out.prompt_token_ids, out.prompt_logprobs, job.params.prompt_logprobs)
    return found


def token_records(
    tokens: Sequence[int], found: Sequence[Mapping[int, Logprob] | None], n: int | None
) -> list[dict[str, Any] | None]:
    """With the `n` likeliest tokens, less those that could not come: −∞ is no JSON."""

    def record(token: int, at: Mapping[int, Logprob]) -> dict[str, Any]:
        own, likeliest = at[token], islice(at.items(), n)
        top = [[other, one.logprob] for other, one in likeliest if isfinite(one.logprob)]
        return {"token_id": token, "token": own.decoded_token, "logprob": own.logprob, "rank": own.rank, "top": top}

    return [None if at is None else record(token, at) for token, at in zip(tokens, found, strict=False)]


def write(text: str) -> None:
    """To stdout, at once."""
    if not text:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        leave_stdout()
        raise UserError(f"cannot write to stdout: {error.strerror}") from error


def say(text: str) -> None:
    """A line on stderr.  Where that is closed or full there is nobody to tell, and it ends nothing."""
    if sys.stderr is None:  # print would turn to stdout
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        return


def leave_stdout() -> None:
    """Point stdout elsewhere, so that Python's own flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def summary(outputs: Sequence[RequestOutput], took_s: float, compile_s: float) -> str:
    """Tokens, seconds, tok/s, mean acceptance; compiling (or reading compiled steps) is counted apart."""
    tokens = sum(len(out.token_ids) for out in outputs)
    accepted = [length for out in outputs for length in out.accept_lengths]
    mean = f"{sum(accepted) / len(accepted):.2f}" if accepted else "-"
    aborted = sum(out.finish_reason == "abort" for out in outputs)
    notes = [f"{compile_s:.1f} s to make the steps ready not counted"] if compile_s else []
    what = "samples" if any(out.index for out in outputs) else "prompts"
    notes += [f"{aborted} of {len(outputs)} {what} not finished"] if aborted else []
    return (
        f"{tokens} token{'s' if tokens != 1 else ''} in {took_s:.2f} s, {tokens / max(took_s, 1e-9):.1f} tok/s,"
        f" mean acceptance {mean}" + (f" ({'; '.join(notes)})" if notes else "")
    )


def run(args: argparse.Namespace) -> int:
    prompts = read_prompts(args)
    params = options.sampling_params(args)
    llm = load_llm(args)
    names, originals = zip(*prompts, strict=True)
    jobs = llm.make_jobs([with_template(llm, prompt, args) for prompt in originals], params, names)
    before_s, compiled_s = time.perf_counter(), llm.engine.compile_s
    originals = [original for original in originals for _ in range(params.n)]
    code = serve(llm, jobs, Printer(llm, originals, jobs, args.json))
    compile_s = llm.engine.compile_s - compiled_s
    took_s = time.perf_counter() - before_s - compile_s
    if not args.quiet:
        say(summary([job.output() for job in jobs], took_s, compile_s))
    for job in jobs:
        if job.error:
            say(f"error: {job.error}")
            code = code or EXIT_USER_ERROR
    return code


def serve(llm: LLM, jobs: Sequence[Job], printer: Printer) -> int:
    """Run and show the jobs; the exit code.  A signal ends them between two steps, with everything shown."""
    from dflash_jax.engine.interrupts import HeldInterrupts

    try:
        with HeldInterrupts() as held:
            serving = llm.serve(jobs)
            for _ in serving:
                printer.show()
                if held.arrived:
                    break
            serving.close()
            printer.show()
    except KeyboardInterrupt as error:
        return signal_code(error)
    return 0


def signal_code(error: KeyboardInterrupt) -> int:
    return EXIT_SIGNAL + (error.args[0] if error.args else signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        configure_stdout(errors="replace")
        args = parse_arguments(sys.argv[1:] if argv is None else argv)
        configure_logging(args.quiet)
        if args.json:
            configure_stdout(errors="backslashreplace", encoding="utf-8")  # half a surrogate becomes a JSON escape
        return run(args)
    except UserError as error:
        say(f"error: {error}")
        return EXIT_USER_ERROR
    except KeyboardInterrupt as error:
        return signal_code(error)
    except BrokenPipeError:  # the reader has gone
        leave_stdout()
        return EXIT_SIGNAL + signal.SIGPIPE


def configure_logging(quiet: bool) -> None:
    """The library's log on stderr, a line each."""
    handler = logging.StreamHandler(sys.stderr)
    log.handlers[:] = [handler]
    log.setLevel(logging.ERROR if quiet else logging.INFO)


def configure_stdout(errors: str, encoding: str | None = None) -> None:
    """JSON is UTF-8 whatever the terminal; text gets question marks where the terminal cannot show it.

    UserError if there is no stdout: no model needs to be loaded to find that out.
    """
    if sys.stdout is None:
        raise UserError("stdout is closed, and the output has nowhere else to go")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=errors, encoding=encoding)


def raise_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # a polite kill keeps the text too
        signal.signal(number, raise_interrupt)
    sys.exit(main())
