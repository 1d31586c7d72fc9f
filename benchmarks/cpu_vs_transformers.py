"""Plain decoding and a 16-token verify step of the demo target, beside transformers, in one run on this CPU.

    python benchmarks/cpu_vs_transformers.py --torch-python PYTHON --gguf FILE [--name cpu-smollm2]

PYTHON is an interpreter with torch, transformers, accelerate and gguf; both sides use float32 and the same two
threads, and take turns so that a noisy machine troubles both.  Ratios are what counts.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

from record import record
from rounds import time_rounds

from dflash_jax import LLM, SamplingParams

PROMPT = [{"role": "user", "content": "Explain how a rainbow forms, step by step."}]
NEW_TOKENS = 64
TORCH_SIDE = r"""
import json, pathlib, sys, time
import torch, transformers
torch.set_num_threads(2)
path, ids = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
ids = torch.tensor([ids])
def generate(n):
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False)
    return time.perf_counter() - start, out[0, ids.shape[1]:].tolist()
def verify():
    with torch.inference_mode():
        cache = model(ids, use_cache=True).past_key_values
        start = time.perf_counter()
        model(ids[:, :16], past_key_values=cache, use_cache=True)
        return time.perf_counter() - start
generate(4); verify()
print("ready", flush=True)
for line in sys.stdin:
    n = int(line)
    one, _ = generate(1)
    took, tokens = generate(n)
    print(json.dumps({"tok_s": (n - 1) / (took - one), "verify_ms": verify() * 1e3, "tokens": tokens}), flush=True)
"""


def ours(llm: LLM, ids: list[int]) -> dict[str, float | list[int]]:
    out = llm.generate([ids], SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))[0]
    verify_s = statistics.median(time_rounds(llm, len(ids), block=16, repeats=3))
    return {"tok_s": out.tokens_per_s or 0.0, "verify_ms": verify_s * 1e3, "tokens": out.token_ids}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", required=True)
    parser.add_argument("--gguf", required=True, type=pathlib.Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="cpu-smollm2")
    args = parser.parse_args()
    llm = LLM(str(args.gguf), "none", platform="cpu", dtype="float32", enable_prefix_caching=False)
    ids = llm.encode(PROMPT)
    ours(llm, ids)
    with subprocess.Popen(
        [args.torch_python, "-c", TORCH_SIDE, str(args.gguf), json.dumps(ids)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as torch_side:  # fmt: skip
        assert torch_side.stdin and torch_side.stdout
        assert torch_side.stdout.readline().strip() == "ready"
        rows = []
        for _ in range(args.repeats):
            torch_side.stdin.write(f"{NEW_TOKENS}\n")
            torch_side.stdin.flush()
            theirs = json.loads(torch_side.stdout.readline())
            rows.append((ours(llm, ids), theirs))
        torch_side.stdin.close()
    values = {"tokens_equal": all(mine["tokens"] == theirs["tokens"] for mine, theirs in rows)}
    for key in ("tok_s", "verify_ms"):
        mine, theirs = (statistics.median(row[i][key] for row in rows) for i in (0, 1))
        values |= {f"ours_{key}": mine, f"transformers_{key}": theirs, f"{key}_ratio": mine / theirs}
    print(json.dumps(values, indent=1))
    print("written:", record(args.name, values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
