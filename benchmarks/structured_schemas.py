"""50 JSON schemas, constrained and unconstrained: does the output parse and validate, in how many rounds, how drafted?

    python benchmarks/structured_schemas.py --target MODEL.gguf --draft ngram --name structured-schemas-cpu

The prompts and schemas are tests/data/schemas.jsonl.  Needs the packages llguidance and jsonschema.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jsonschema
from record import record

from dflash_jax import LLM, RequestOutput, SamplingParams, StructuredOutputs

SCHEMAS = pathlib.Path(__file__).parents[1] / "tests" / "data" / "schemas.jsonl"


def problem(text: str, schema: Any) -> str | None:
    """What is wrong with the text, if anything."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def figures(outputs: Sequence[RequestOutput], schemas: Sequence[Any], took_s: float) -> dict[str, Any]:
    problems = [problem(out.text or "", schema) for out, schema in zip(outputs, schemas, strict=True)]
    accepted = [out.mean_accept_length for out in outputs if out.mean_accept_length]
    return {
        "valid": sum(one is None for one in problems),
        "problems": [one for one in problems if one][:5],
        "tokens": sum(len(out.token_ids) for out in outputs),
        "rounds": sum(out.rounds for out in outputs),
        "mean_accept_length": sum(accepted) / len(accepted),
        "seconds": round(took_s, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--max-new-tokens", type=int, default=400)
    parser.add_argument("--name", default="structured-schemas-cpu")
    args = parser.parse_args()
    cases = [json.loads(line) for line in SCHEMAS.read_text(encoding="utf-8").splitlines()]
    schemas = [case["schema"] for case in cases]
    prompts = [[{"role": "user", "content": f"{case['prompt']} Answer in JSON."}] for case in cases]
    llm = LLM(args.target, args.draft, max_running_requests=8, max_model_len=1024)
    values: dict[str, Any] = {"schemas": len(cases), "draft": args.draft}
    shaped = [SamplingParams(args.max_new_tokens, structured_outputs=StructuredOutputs(json=one)) for one in schemas]
    free = [SamplingParams(args.max_new_tokens)] * len(cases)
    for name, params in (("constrained", shaped), ("unconstrained", free)):
        start_s = time.perf_counter()
        outputs = llm.generate(prompts, params, progress=True)
        values[name] = figures(outputs, schemas, time.perf_counter() - start_s)
        print(name, json.dumps(values[name]), flush=True)
    print("written:", record(args.name, values))
    return 0 if values["constrained"]["valid"] == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
