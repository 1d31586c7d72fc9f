"""Write pairs/*/draft.npz and pairs/*/rounds.json: the inside of the first round, and what each round drafted.

    python tests/data/make_draft_goldens.py [PAIR_FOLDER ...]

Needs torch, transformers (5.15.0 was used) and `dflash` 0.1.0; the project itself needs none of them.

draft.npz belongs to the third case of expected.json (T=17 prompt tokens, block B, width H, vocabulary V) and holds the
draft of the first round, float32 unless said otherwise: `prompt_ids` [T] int32; `taps` [T, n*H], the target's hidden
states side by side; `context` [T, H], after `fc` and `hidden_norm`; `block_ids` [B] int32; `block_input` [B, H]
(embedding times `input_embedding_scale`); `layer_0` .. [B, H], after each draft layer; `output` [B, H], after the last
norm; `logits` [B-1, V], of rows 1..B-1 after `output_multiplier` and soft capping; `draft_ids` [B-1] int32.

rounds.json has for each case of expected.json: `drafts`, the drafted ids of every comparable round; `target_gap` and
`draft_gap`: how far at least the best logit of the target and of the draft was above the second best in those rounds
(null without rounds; the draft's own gap says less for DFlash 2, whose selector decides).
"""

import json
import pathlib
import sys
from typing import Any

import dflash.model as reference
import numpy as np
import torch
from make_pairs import FOLDER, decode, load

Case = dict[str, Any]


def smallest_gap(logits: torch.Tensor) -> float:
    """Best minus second best, the least over all rows of [..., V]."""
    top = logits.topk(2, -1).values
    return (top[..., 0] - top[..., 1]).min().item()


class Watch:
    """Keeps what passes through the target and the draft's head in each round of one decoding."""

    def __init__(self, model: Any, helper: Any) -> None:
        self.blocks: list[list[int]] = []
        self.target_logits: list[torch.Tensor] = []
        self.draft_logits: list[torch.Tensor] = []
        self._hook = model.register_forward_hook(self._verified)
        self._helper, self._head = helper, helper.compute_logits
        helper.compute_logits = self._scored

    def _verified(self, _: Any, args: tuple[torch.Tensor, ...], out: Any) -> None:
        self.blocks.append(args[0][0].tolist())
        self.target_logits.append(out.logits[0])

    def _scored(self, hidden: torch.Tensor, head: Any) -> torch.Tensor:
        self.draft_logits.append(self._head(hidden, head))
        return self.draft_logits[-1]

    def close(self) -> None:
        """Put everything back."""
        self._hook.remove()
        self._helper.compute_logits = self._head


def rounds(model: Any, helper: Any, case: Case) -> Case:
    """The entry of rounds.json for one case; raises ValueError when expected.json says otherwise."""
    watch = Watch(model, helper)
    tokens, accepted = decode(model, helper, case["prompt_ids"], case["max_new_tokens"], case["block_size"])
    watch.close()
    if (tokens, accepted) != (case["token_ids"], case["accept_lengths"]):
        raise ValueError(f"expected.json has {case['accept_lengths']} accepted, this run {accepted}")
    count = case["comparable_rounds"]
    if not count:
        return {"drafts": [], "target_gap": None, "draft_gap": None}
    lengths = [1, *accepted[:count]]  # the prompt gives one row, a round those that decided its tokens
    used = [logits[:length] for logits, length in zip(watch.target_logits, lengths, strict=False)]
    return {"drafts": [block[1:] for block in watch.blocks[1 : count + 1]],
            "target_gap": round(min(smallest_gap(x) for x in used), 6),
            "draft_gap": round(min(smallest_gap(x) for x in watch.draft_logits[:count]), 6)}


@torch.no_grad()
def first_round(model: Any, helper: Any, case: Case) -> dict[str, np.ndarray]:
    """The arrays of draft.npz."""
    prompt, block = torch.tensor([case["prompt_ids"]]), helper.block_size
    out = model(prompt, output_hidden_states=True)
    taps = reference.extract_context_feature(out.hidden_states, helper.target_layer_ids)
    ids = torch.full((1, block), helper.mask_token_id)
    ids[0, 0] = out.logits[0, -1].argmax()
    scale = float(reference._draft_value(helper.config, "input_embedding_scale", 1.0))
    block_input = reference._raw_input_embeddings(model, ids, scale)
    layers: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, __, x: layers.append(x)) for layer in helper.layers]
    output = helper(position_ids=torch.arange(prompt.shape[1] + block)[None], target_hidden=taps,
                    noise_embedding=block_input)
    for hook in hooks:
        hook.remove()
    logits = helper.compute_logits(output[:, 1:], model.lm_head)
    draft_ids = logits.argmax(-1)
    if hasattr(helper, "propose"):
        draft_ids = helper.propose(output[:, 1:], ids[:, 0], model.lm_head, 0.0)[0]
    arrays = {"taps": taps, "context": helper.hidden_norm(helper.fc(taps)), "block_input": block_input,
              "output": output, "logits": logits, **{f"layer_{i}": x for i, x in enumerate(layers)}}
    numbers = {"prompt_ids": prompt, "block_ids": ids, "draft_ids": draft_ids}
    return {**{k: v[0].numpy() for k, v in arrays.items()},
            **{k: v[0].numpy().astype(np.int32) for k, v in numbers.items()}}


def write(folder: pathlib.Path) -> None:
    """Both files of one pair."""
    model, helper = load(folder)
    cases = json.loads((folder / "expected.json").read_text())
    entries = [rounds(model, helper, case) for case in cases]
    arrays = first_round(model, helper, cases[2])
    if (alone := arrays["draft_ids"].tolist()) != (cached := entries[2]["drafts"][0]):
        raise ValueError(f"{folder}: drafted {alone} without a cache, {cached} with one")
    np.savez_compressed(folder / "draft.npz", **arrays)
    (folder / "rounds.json").write_text("[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n")
    gaps = [[e[k] for e in entries if e["drafts"]] for k in ("target_gap", "draft_gap")]
    print(f"{folder.name}: smallest gaps of the target {min(gaps[0])}, of the draft {min(gaps[1])}")


def main() -> None:
    """All pairs, or those named."""
    torch.set_num_threads(1)
    for folder in [pathlib.Path(name) for name in sys.argv[1:]] or sorted(FOLDER.iterdir()):
        write(folder)


if __name__ == "__main__":
    main()
