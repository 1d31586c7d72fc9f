"""`python -m dflash_jax.generate`: text from a prompt, with a draft or without.

Text (or with --json one object per prompt) goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dflash_jax.errors import UserError

if TYPE_CHECKING:
    from dflash_jax.llm import LLM, Job, Prompt, RequestOutput
    from dflash_jax.sampling import SamplingParams

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141  # as if ended by SIGPIPE


class Parser(argparse.ArgumentParser):
    """argparse's usage errors in the form of all others: one sentence, exit code 2."""

    def error(self, message: str) -> Any:
        raise UserError(message)


def make_parser() -> argparse.ArgumentParser:
    p = Parser(prog="python -m dflash_jax.generate", description="Text from a prompt, with a draft or without.")
    p.add_argument("prompts", nargs="*", metavar="PROMPT", help="text; several run together")
    p.add_argument("--target", help="Hugging Face folder, hub id or .gguf file (default: the demo target)")
    p.add_argument("--draft", help="draft folder or hub id; 'none' = plain decoding")
    source = p.add_argument_group("prompts")
    source.add_argument("--prompts-file", metavar="F", help="a prompt a line, as text or JSON; '-' is stdin")
    source.add_argument("--prompt-ids", metavar="1,2,3", help="a prompt as token ids; needs no tokenizer")
    source.add_argument("--raw", action="store_true", help="no chat template")
    source.add_argument("--system", metavar="TEXT", help="system message")
    sampling = p.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=int, metavar="N", help="default 256")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 = greedy (default)")
    sampling.add_argument("--top-p", type=float, metavar="P")
    sampling.add_argument("--top-k", type=int, metavar="K")
    sampling.add_argument("--min-p", type=float, metavar="P")
    sampling.add_argument("--seed", type=int)
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the output; may be repeated")
    sampling.add_argument("--ignore-eos", action="store_true", default=None)
    execution = p.add_argument_group("execution")
    execution.add_argument("--block-size", type=int, metavar="N", help="2 to the draft's own block size (default)")
    execution.add_argument("--dtype", choices=("auto", "float32", "bfloat16"))
    execution.add_argument("--max-model-len", type=int, metavar="N", help="prompt and output tokens together")
    execution.add_argument("--kernels", choices=("auto", "xla", "pallas", "triton"))
    execution.add_argument("--platform", choices=("cpu", "gpu", "tpu"))
    execution.add_argument("--max-running-requests", type=int, metavar="N", help="prompts decoded at once")
    execution.add_argument("--kv-cache-bytes", type=int, metavar="N")
    execution.add_argument("--disable-overlap", dest="overlap", action="store_false", default=None)
    execution.add_argument("--weights-cache", metavar="DIR", help="keep converted weights there for fast starts")
    p.add_argument("--json", action="store_true", help="one JSON object per prompt on stdout")
    p.add_argument("--quiet", action="store_true", help="no progress and no summary")
    return p


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Prompts from the command line, in the order: arguments, ids, file."""
    prompts: list[Any] = [checked_text(text, "the prompt") for text in args.prompts]
    if args.prompt_ids is not None:
        prompts.append(parse_ids(args.prompt_ids))
    if args.prompts_file is not None:
        prompts.extend(read_prompts_file(args.prompts_file))
    if not prompts:
        raise UserError("no prompt is given: pass one as an argument, or use --prompts-file or --prompt-ids")
    return prompts


def checked_text(text: str, name: str) -> str:
    if not text.strip():
        raise UserError(f"{name} is empty")
    return text


def parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--prompt-ids must be integers separated by commas, not {text!r}") from None


def read_prompts_file(name: str) -> Iterator[Any]:
    """One prompt a line: plain text, a JSON string, {"prompt": text or ids} or {"messages": […]}."""
    try:
        with open(sys.stdin.fileno() if name == "-" else name, encoding="utf-8", closefd=name != "-") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UserError(f"cannot read --prompts-file {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts-file {name} is not UTF-8 text: {error}") from error
    found = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f"--prompts-file {name} holds no prompt")
    return iter([parse_line(line, f"{name} line {i}") for i, line in found])


def parse_line(line: str, where: str) -> Any:
    if line.lstrip()[0] not in '{"':
        return line
    try:
        value = json.loads(line)
    except ValueError:
        if line.lstrip()[0] == '"':
            return line  # a line of plain text that begins with a quotation mark
        raise UserError(f"{where} begins like JSON but is not valid JSON: {line[:60]!r}") from None
    if isinstance(value, str):
        return checked_text(value, where)
    for key in ("messages", "prompt"):
        if key in value:
            return checked_prompt(value[key], key, where)
    raise UserError(f"{where} needs a key 'prompt' or 'messages', and has {', '.join(value) or 'none'}")


def checked_prompt(value: Any, key: str, where: str) -> Any:
    """`prompt` is text or a list of ids; `messages` a list of objects (whose content the chat template checks)."""
    if key == "prompt" and isinstance(value, str):
        return checked_text(value, where)
    kind = int if key == "prompt" else dict
    if isinstance(value, list) and value and all(type(item) is kind for item in value):
        return value
    wanted = "text or a list of token ids" if key == "prompt" else "a list of message objects"
    raise UserError(f"{where}: {key} must be {wanted}, not {json.dumps(value)[:60]}")


def with_template(llm: LLM, prompt: Any, args: argparse.Namespace) -> Any:
    """A text becomes a user message when the tokenizer has a chat template, unless --raw."""
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    if isinstance(prompt, str):
        if args.raw or llm.tokenizer is None or llm.tokenizer.chat_template is None:
            if system:
                reason = "--raw is given" if args.raw else f"target {llm.target} has none"
                raise UserError(f"--system needs a chat template, and {reason}")
            return prompt
        return [*system, {"role": "user", "content": prompt}]
    if isinstance(prompt[0], dict) and system and prompt[0].get("role") != "system":
        return [*system, *prompt]
    return prompt


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    from dflash_jax.sampling import SamplingParams

    names = [field.name for field in dataclasses.fields(SamplingParams)]
    given = {name: getattr(args, name, None) for name in names}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def load_llm(args: argparse.Namespace) -> LLM:
    from dflash_jax.llm import LLM

    names = ("block_size", "dtype", "max_model_len", "kernels", "max_running_requests", "kv_cache_bytes", "overlap",
             "weights_cache")  # fmt: skip
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return LLM(args.target, args.draft, platform=args.platform, progress=not args.quiet, **options)


class Printer:
    """Shows jobs in the order of the prompts: the first unfinished one streams, later ones wait their turn."""

    def __init__(self, llm: LLM, originals: Sequence[Any], jobs: Sequence[Job], as_json: bool):
        self.llm = llm
        self.originals = originals
        self.jobs = jobs
        self.as_json = as_json
        self.turn = 0

    def show(self) -> None:
        """Print what is new."""
        while self.turn < len(self.jobs):
            job = self.jobs[self.turn]
            if not self.as_json:
                self._write(job.new_text() if job.stream else job.new_ids())
            if not job.finished:
                return
            self._end(job)
            self.turn += 1

    def _end(self, job: Job) -> None:
        if self.as_json:
            self._write(json.dumps(self.record(job), ensure_ascii=False) + "\n")
        else:
            self._write("\n" if self.turn + 1 == len(self.jobs) else "\n\n")

    def record(self, job: Job) -> dict[str, Any]:
        out = job.output()
        return {
            "prompt": self.originals[self.turn],
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
        }

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()


def summary(outputs: Sequence[RequestOutput], took_s: float, compile_s: float) -> str:
    """tokens, seconds, tok/s, mean acceptance; compiling (or reading compiled steps) is counted apart."""
    tokens = sum(len(out.token_ids) for out in outputs)
    accepted = [length for out in outputs for length in out.accept_lengths]
    compiling = f" (and {compile_s:.1f} s to make the steps ready)" if compile_s else ""
    mean = f"{sum(accepted) / len(accepted):.2f}" if accepted else "-"
    return f"{tokens} tokens in {took_s:.2f} s, {tokens / max(took_s, 1e-9):.1f} tok/s, mean acceptance {mean}{compiling}"


def run(args: argparse.Namespace) -> int:
    prompts = read_prompts(args)
    params = sampling_params(args)
    llm = load_llm(args)
    compile_s = llm.engine.compile_s
    jobs = llm.make_jobs([with_template(llm, prompt, args) for prompt in prompts], params)
    printer = Printer(llm, prompts, jobs, args.json)
    start_s = time.perf_counter()
    serving = llm.serve(jobs)
    code = 0
    try:
        for _ in serving:
            printer.show()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    finally:
        serving.close()
    printer.show()
    compile_s = llm.engine.compile_s - compile_s
    took_s = time.perf_counter() - start_s - compile_s
    if not args.quiet:
        print(summary([job.output() for job in jobs if job.request], took_s, compile_s), file=sys.stderr)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        args = make_parser().parse_args(argv)
        configure_logging(args.quiet)
        return run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone. Point stdout elsewhere, so that Python's own flush at exit does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CLOSED_PIPE


def configure_logging(quiet: bool) -> None:
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    logging.getLogger("dflash_jax").setLevel(logging.ERROR if quiet else logging.INFO)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill keeps the text too
    sys.exit(main())
