"""The authors' torch reference, spoken to over stdin and stdout, a JSON object a line.

Runs as a script, under whatever Python has the `dflash` package; it imports nothing of dflash_jax, and the process ends
with its device memory before anybody else uses the device.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any


def load(options: dict[str, Any]) -> tuple[Any, Any, str]:
    """(target, draft, device); dtype "auto" is float32 on CPU and bfloat16 elsewhere, as in dflash_jax."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    from dflash import model as reference  # pyright: ignore[reportMissingImports]

    device = "cuda" if torch.cuda.is_available() and options["platform"] != "cpu" else "cpu"
    if device == "cpu":  # its clock waits for a GPU
        reference._cuda_time = time.perf_counter
    asked = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    dtype = asked.get(options["dtype"], torch.float32 if device == "cpu" else torch.bfloat16)
    torch.set_num_threads(options["threads"])
    path = Path(options["target"])
    where, gguf = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (options["target"], {})
    target = transformers.AutoModelForCausalLM.from_pretrained(
        where, attn_implementation="sdpa", dtype=dtype, **gguf
    )
    config = json.loads((Path(options["draft"]) / "config.json").read_text(encoding="utf-8"))
    second = "DFlash2DraftModel" in (config.get("architectures") or [])
    draft_class = reference.DFlash2DraftModel if second else reference.DFlashDraftModel
    draft = draft_class.from_pretrained(options["draft"], attn_implementation="sdpa", dtype=dtype)
    return target.to(device).eval(), draft.to(device).eval(), device


def answer(target: Any, draft: Any, device: str, ask: dict[str, Any]) -> dict[str, Any]:
    """Tokens, rounds and times of one prompt."""
    import torch  # pyright: ignore[reportMissingImports]
    from dflash.model import dflash_generate  # pyright: ignore[reportMissingImports]

    ids = torch.tensor([ask["ids"]], device=device)
    start_s = time.perf_counter()
    found = dflash_generate(
        draft, target, ids, ask["max_tokens"], ask["stop_ids"] or None, ask["temperature"], ask["top_p"], ask["top_k"],
        block_size=ask["block_size"], return_stats=True,
    )  # fmt: skip
    took_s = time.perf_counter() - start_s
    return {
        "token_ids": found.output_ids[0, len(ask["ids"]) :].tolist(),
        "accept_lengths": [int(n) for n in found.acceptance_lengths],
        "ttft_s": found.time_to_first_token,
        "e2e_s": took_s,
    }


def peak_bytes(device: str) -> int | None:
    import torch  # pyright: ignore[reportMissingImports]

    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii").splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def main() -> None:
    def say(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=out, flush=True)

    out, sys.stdout = sys.stdout, sys.stderr  # whatever libraries print must not end up between the answers
    target, draft, device = load(json.loads(sys.stdin.readline()))
    names = ("dflash", "torch", "transformers")
    say({"device": device, "block_size": int(draft.block_size), "dtype": str(target.dtype).removeprefix("torch."),
         "packages": {name: importlib.metadata.version(name) for name in names}})  # fmt: skip
    for line in sys.stdin:
        say(answer(target, draft, device, json.loads(line)) | {"peak_memory_bytes": peak_bytes(device)})


if __name__ == "__main__":
    main()
