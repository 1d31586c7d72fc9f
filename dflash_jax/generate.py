"""`python -m dflash_jax.generate`: text from a prompt, with a draft or without.

Text (or with --json one object per prompt) goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from dflash_jax.errors import UserError
from dflash_jax.text.prompts import Named, check_text, parse_ids, read_prompts_file, shortened

if TYPE_CHECKING:
    from dflash_jax.llm import LLM, Job, RequestOutput
    from dflash_jax.sampling import SamplingParams

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
    add_models(p.add_argument_group("models"))
    add_prompts(p.add_argument_group("prompts"))
    add_sampling(p.add_argument_group("sampling"))
    add_execution(p.add_argument_group("execution"))
    output = p.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object per prompt (with --n: per sample) on"
                        " stdout, nothing else there")  # fmt: skip
    output.add_argument("--quiet", action="store_true", help="only errors on stderr: no progress, no summary")
    return p


def add_models(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--target", metavar="T", help="Hugging Face folder, hub id or .gguf file (default: the demo"
                       " model SmolLM2-135M-Instruct, downloaded once: 93 MB)")  # fmt: skip
    group.add_argument("--draft", metavar="D", help="draft folder or hub id made for that target; 'ngram'"
                       " copies from the text so far, 'none' decodes without (default: that of the demo model; with"
                       " --target: none)")  # fmt: skip


def add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompts-file", metavar="F", help="a prompt a line: plain text, or JSON as \"text\","
                       " {\"prompt\": …} or {\"messages\": […]}; '-' is stdin")  # fmt: skip
    group.add_argument("--prompt-ids", metavar="1,2,3", action="append", help="a prompt as token ids, for which no"
                       " tokenizer is needed; may be repeated")  # fmt: skip
    group.add_argument("--raw", action="store_true", help="continue the text as it stands, without chat template")
    group.add_argument("--system", metavar="TEXT", help="system message of the chat")


def add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="longest output in tokens (default: 256)")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default)")
    group.add_argument("--top-p", type=float, metavar="P", help="likeliest tokens that together reach P")
    group.add_argument("--top-k", type=int, metavar="K", help="the K likeliest tokens")
    group.add_argument("--min-p", type=float, metavar="P", help="tokens at least P times as likely as the likeliest")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same tokens (default: a random one, reported)")
    group.add_argument("--n", type=int, metavar="N", help="samples of each prompt, with seeds that count up from"
                       " --seed; needs a temperature (default: 1)")  # fmt: skip
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the output and is cut from it;"
                       " may be repeated")  # fmt: skip
    group.add_argument("--include-stop-str-in-output", action="store_true", default=None, help="keep the text that"
                       " ended the output")  # fmt: skip
    group.add_argument("--min-tokens", type=int, metavar="N", help="before so many nothing but the context's end stops"
                       " (default: 0)")  # fmt: skip
    group.add_argument("--stop-token-ids", metavar="1,2,3", help="token ids that end the output as the model's own"
                       " end-of-text tokens do")  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on after end-of-text tokens")


def add_execution(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--block-size", type=int, metavar="N", help="tokens per block, 2 to what the draft was trained"
                       " for (default: that)")  # fmt: skip
    group.add_argument("--speculation", choices=("auto", "always", "never"), help="'never' leaves the draft out;"
                       " 'auto' (default) and 'always' differ only in engines that were warmed up")  # fmt: skip
    group.add_argument("--draft-sampling", choices=("coupled", "argmax"), help="where a temperature is given, drafts"
                       " are drawn with the noise of the target's own draw (default) or are the likeliest tokens; the"
                       " output is the same")  # fmt: skip
    group.add_argument("--draft-temperature", type=float, metavar="T", help="for coupled drafts (default: that of the"
                       " request)")  # fmt: skip
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), help="of weights and KV cache (default:"
                       " auto = float32 on CPU, bfloat16 elsewhere)")  # fmt: skip
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt and output together, in tokens"
                       " (default: the model's, or what the KV cache holds)")  # fmt: skip
    group.add_argument("--kernels", choices=("auto", "xla", "pallas", "triton"), help="default: auto, by platform")
    group.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="default: the best one that JAX finds")
    group.add_argument("--max-running-requests", type=int, metavar="N", help="prompts decoded at once (default: 8)")
    group.add_argument("--kv-cache-bytes", type=int, metavar="N", help="memory for the KV cache of target and draft"
                       " (default: 512 MiB on CPU, most of what is free elsewhere)")  # fmt: skip
    group.add_argument("--disable-overlap", dest="overlap", action="store_false", default=None, help="read each round"
                       " before the next is launched")  # fmt: skip
    group.add_argument("--weights-cache", metavar="DIR", help="keep converted weights there, for faster starts")


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


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    from dflash_jax.sampling import SamplingParams

    names = [field.name for field in dataclasses.fields(SamplingParams)]
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    if args.stop_token_ids is not None:
        given["stop_token_ids"] = parse_ids(args.stop_token_ids, "--stop-token-ids")
    params = SamplingParams(**given)
    idle = [f"--{name.replace('_', '-')}" for name in ("top_p", "top_k", "min_p", "seed") if name in given]
    if params.temperature == 0 and idle:
        log.warning("%s without --temperature: decoding is greedy", " ".join(idle))
    return params


def load_llm(args: argparse.Namespace) -> LLM:
    from dflash_jax.llm import LLM

    names = ("block_size", "speculation", "draft_sampling", "draft_temperature", "dtype", "max_model_len", "kernels",
             "max_running_requests", "kv_cache_bytes", "overlap", "weights_cache")  # fmt: skip
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    bars = not args.quiet and sys.stderr is not None and sys.stderr.isatty()  # elsewhere, bars are a flood of lines
    return LLM(args.target, args.draft, platform=args.platform, progress=bars, **options)


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
        }


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
    params = sampling_params(args)
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
