"""The options of the command line that say what to decode and how, and what the library is asked for by them."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from typing import TYPE_CHECKING, Any

from dflash_jax.errors import UserError
from dflash_jax.text.prompts import check_sizes, parse_ids, shortened

if TYPE_CHECKING:
    from dflash_jax.sampling import SamplingParams
    from dflash_jax.structured import StructuredOutputs

log = logging.getLogger("dflash_jax")

Group = argparse._ArgumentGroup  # pyright: ignore[reportPrivateUsage]
ID_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_token_ids")
SHAPES = ("json_schema", "regex", "choice", "grammar", "json_object")  # `json_schema` is StructuredOutputs.json
ENGINE_OPTIONS = (
    "block_size", "speculation", "draft_sampling", "draft_temperature", "speculative_token_map", "logprobs_mode",
    "dtype", "max_model_len", "kernels", "tensor_parallel_size", "max_running_requests", "kv_cache_bytes", "overlap",
    "weights_cache",
)  # fmt: skip


def add_models(group: Group) -> None:
    group.add_argument("--target", metavar="T", help="Hugging Face folder, hub id or .gguf file (default: the demo"
                       " model SmolLM2-135M-Instruct, downloaded once: 93 MB)")  # fmt: skip
    group.add_argument("--draft", metavar="D", help="draft folder or hub id made for that target; 'ngram'"
                       " copies from the text so far, 'none' decodes without (default: that of the demo model; with"
                       " --target: none)")  # fmt: skip


def add_prompts(group: Group) -> None:
    group.add_argument("--prompts-file", metavar="F", help="a prompt a line: plain text, or JSON as \"text\","
                       " {\"prompt\": …} or {\"messages\": […]}; '-' is stdin")  # fmt: skip
    group.add_argument("--prompt-ids", metavar="1,2,3", action="append", help="a prompt as token ids, for which no"
                       " tokenizer is needed; may be repeated")  # fmt: skip
    group.add_argument("--raw", action="store_true", help="continue the text as it stands, without chat template")
    group.add_argument("--system", metavar="TEXT", help="system message of the chat")


def add_sampling(group: Group) -> None:
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default)")
    group.add_argument("--top-p", type=float, metavar="P", help="likeliest tokens that together reach P")
    group.add_argument("--top-k", type=int, metavar="K", help="the K likeliest tokens")
    group.add_argument("--min-p", type=float, metavar="P", help="tokens at least P times as likely as the likeliest")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same tokens (default: a random one, reported)")
    group.add_argument("--n", type=int, metavar="N", help="samples of each prompt, with seeds that count up from"
                       " --seed; needs a temperature (default: 1)")  # fmt: skip


def add_ends(group: Group) -> None:
    group.add_argument("--max-new-tokens", type=int, metavar="N", help="longest output in tokens (default: 256)")
    group.add_argument("--min-tokens", type=int, metavar="N", help="before so many nothing but the context's end stops"
                       " (default: 0)")  # fmt: skip
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the output and is cut from it;"
                       " may be repeated")  # fmt: skip
    group.add_argument("--include-stop-str-in-output", action="store_true", default=None, help="keep the text that"
                       " ended the output")  # fmt: skip
    group.add_argument("--stop-token-ids", metavar="1,2,3", help="token ids that end the output as the model's own"
                       " end-of-text tokens do")  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on after end-of-text tokens")


def add_edits(group: Group) -> None:
    group.add_argument("--repetition-penalty", type=float, metavar="R", help="divides the logits of tokens of prompt"
                       " and output (default: 1)")  # fmt: skip
    group.add_argument("--presence-penalty", type=float, metavar="P", help="taken from the logits of tokens of the"
                       " output (default: 0)")  # fmt: skip
    group.add_argument("--frequency-penalty", type=float, metavar="F", help="the same, as often as they are there")
    group.add_argument("--logit-bias", metavar="50=2.5,7=-100", help="added to the logits of these tokens")
    group.add_argument("--allowed-token-ids", metavar="1,2,3", help="no other tokens may come")
    group.add_argument("--bad-token-ids", metavar="1,2,3", help="these tokens may not come")


def add_structured(group: Group) -> None:
    group.add_argument("--json-schema", metavar="FILE|TEXT", help="the text is JSON of this schema")
    group.add_argument("--json-object", action="store_true", default=None, help="the text is any JSON object")
    group.add_argument("--regex", metavar="R", help="the whole text matches this expression")
    group.add_argument("--choice", action="append", metavar="TEXT", help="the text is this one; repeated: or that one")
    group.add_argument("--grammar", metavar="FILE|TEXT", help="the text follows this grammar (Lark or GBNF)")


def add_logprobs(group: Group) -> None:
    group.add_argument("--logprobs", type=int, metavar="N", help="log-probabilities of each token and of the N"
                       " likeliest at its place (0: of the token alone)")  # fmt: skip
    group.add_argument("--prompt-logprobs", type=int, metavar="N", help="the same for the tokens of the prompt")
    group.add_argument("--logprobs-mode", help="of the model's own distribution (raw_…, default) or of the one that is"
                       " drawn from, or logits in their place",
                       choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"))  # fmt: skip


def add_execution(group: Group) -> None:
    group.add_argument("--block-size", type=int, metavar="N", help="tokens per block, 2 to what the draft was trained"
                       " for (default: that)")  # fmt: skip
    group.add_argument("--speculation", choices=("auto", "always", "never"), help="'never' leaves the draft out;"
                       " 'auto' (default) and 'always' differ only in engines that were warmed up")  # fmt: skip
    group.add_argument("--draft-sampling", choices=("coupled", "argmax"), help="where a temperature is given, drafts"
                       " are drawn with the noise of the target's own draw (default) or are the likeliest tokens; the"
                       " output is the same")  # fmt: skip
    group.add_argument("--draft-temperature", type=float, metavar="T", help="for coupled drafts (default: that of the"
                       " request)")  # fmt: skip
    group.add_argument("--speculative-token-map", metavar="FILE", help="JSON list of the token ids that the draft may"
                       " propose to greedy requests; 'none': all (default: on CPU the draft's own list, if it has"
                       " one)")  # fmt: skip
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), help="of weights and KV cache (default:"
                       " auto = float32 on CPU, bfloat16 elsewhere)")  # fmt: skip
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt and output together, in tokens"
                       " (default: the model's, or what the KV cache holds)")  # fmt: skip
    group.add_argument("--kernels", choices=("auto", "xla", "pallas", "triton", "native"), help="default: auto, by"
                       " platform")  # fmt: skip
    group.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="default: the best one that JAX finds")
    group.add_argument("--tensor-parallel-size", type=int, metavar="N", help="devices that share the model: its heads,"
                       " MLPs, vocabulary and KV cache (default: 1)")  # fmt: skip
    group.add_argument("--max-running-requests", type=int, metavar="N", help="prompts decoded at once (default: 8)")
    group.add_argument("--kv-cache-bytes", type=int, metavar="N", help="memory for the KV cache of target and draft on"
                       " each device (default: 512 MiB on CPU, most of what is free elsewhere)")  # fmt: skip
    group.add_argument("--disable-overlap", dest="overlap", action="store_false", default=None, help="read each round"
                       " before the next is launched")  # fmt: skip
    group.add_argument("--weights-cache", metavar="DIR", help="keep converted weights there, for faster starts")


GROUPS = {
    "models": add_models, "prompts": add_prompts, "sampling": add_sampling, "when to end": add_ends,
    "what may come": add_edits, "structured output (one of)": add_structured,
    "log-probabilities (with --json)": add_logprobs, "execution": add_execution,
}  # fmt: skip


# -- what they ask for -------------------------------------------------------------------------------------------------


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those of `EngineSettings` that are given."""
    return {name: getattr(args, name) for name in ENGINE_OPTIONS if getattr(args, name) is not None}


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    from dflash_jax.sampling import SamplingParams

    _check_place(args)
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    given |= {name: parse_ids(given[name], _option(name)) for name in ID_LISTS if name in given}
    if args.logit_bias is not None:
        given["logit_bias"] = parse_bias(args.logit_bias)
    params = SamplingParams(**given, structured_outputs=structured_outputs(args))
    _warn_of_idle(args, params)
    return params


def _check_place(args: argparse.Namespace) -> None:
    """Log-probabilities are shown in JSON alone."""
    lost = [_option(name) for name in ("logprobs", "prompt_logprobs") if getattr(args, name) is not None]
    if lost and not args.json:
        raise UserError(f"{' and '.join(lost)} would be lost in plain text: add --json")


def _warn_of_idle(args: argparse.Namespace, params: SamplingParams) -> None:
    names = ("top_p", "top_k", "min_p", "seed", "draft_sampling", "draft_temperature")
    idle = [name for name in names if getattr(args, name) is not None]
    if params.greedy and idle:
        log.warning("%s without --temperature: decoding is greedy", " ".join(map(_option, idle)))
    if args.logprobs_mode is not None and params.logprobs is None:
        log.warning("--logprobs-mode without --logprobs: it changes nothing")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def parse_bias(text: str) -> dict[int, float]:
    """`50=2.5,7=-100` as token ids and what is added to their logits."""
    try:
        pairs = [(int(token), float(value)) for token, value in (part.split("=") for part in text.split(","))]
    except ValueError:  # also for parts that are none or too many
        wrong = shortened(repr(text))
        raise UserError(f"--logit-bias must be TOKEN=NUMBER separated by commas, not {wrong}") from None
    tokens = [token for token, _ in pairs]
    check_sizes("--logit-bias", tokens)
    twice = [token for token in tokens if tokens.count(token) > 1]
    if twice:
        raise UserError(f"--logit-bias names token {twice[0]} twice")
    return dict(pairs)


def structured_outputs(args: argparse.Namespace) -> StructuredOutputs | None:
    """The shape that is asked for, if any."""
    from dflash_jax.structured import StructuredOutputs

    given = [name for name in SHAPES if getattr(args, name) is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(map(_option, given))} are given, and a text has one shape at most")
    if not given:
        return None
    if args.json_schema is not None:
        return StructuredOutputs(json=text_or_file("--json-schema", args.json_schema, "{", "a JSON object"))
    if args.grammar is not None:
        return StructuredOutputs(grammar=text_or_file("--grammar", args.grammar, ":", "a grammar"))
    return StructuredOutputs(**{given[0]: getattr(args, given[0])})


def text_or_file(option: str, value: str, mark: str, kind: str) -> str:
    """The content of the file `value`, where there is one, otherwise `value`, which must hold `mark` to be a `kind`."""
    if not os.path.exists(value) or os.path.isdir(value):
        if mark not in value:
            raise UserError(f"{option} is neither a file nor {kind}: {shortened(repr(value))}")
        return value
    try:
        with open(value, encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        raise UserError(f"cannot read {option} {value}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{option} {value} is not UTF-8 text: {error}") from error
