"""Write smollm2_greedy.json: what transformers decodes greedily from the demo target, in float32.

    python tests/data/make_smollm2_goldens.py FOLDER/SmolLM2-135M-Instruct.Q4_1.gguf

Needs torch, transformers (5.15.0 was used) and accelerate; the project itself needs none of them.
A case: `name`; one of `messages` (put through the file's chat template), `text` (no template) or neither (ids only);
`prompt_ids`; `max_new_tokens`; `token_ids` (the stop token included); `finish_reason`; `text_out` (special tokens left
out); `gaps`: for each generated token how far its logit was above the second best.  A small gap marks a step where
another correct float32 implementation may choose differently.
"""

import json
import pathlib
import sys
from typing import Any

import torch
import transformers

EOS = 2
STORY = (
    "The lighthouse at the end of the long stone pier had not been lit for eleven years when Marta came to paint it. "
    "She had been told that the walls drank colour, that no shade of white would stay white there for more than one "
    "winter, and that the gulls would watch her the whole time. All of it was true. On the first morning she scraped "
    "the old flakes from the door and found three layers below them: grey, then green, then a blue so bright that she "
    "stopped and sat down. "
)
MORE = (
    "A fisherman who was mending nets nearby told her that the blue was the oldest. His grandfather had mixed it from "
    "powder that came in paper bags from the city, and every boat in the harbour had carried a stripe of it, so that "
    "wives could tell from the hill who was coming home. Later the company that owned the pier wanted everything "
    "green, and after the company failed the town had only grey. Nobody had asked for blue again. Marta wrote this "
    "down in the small book where she kept the weights of pigments and the names of people who were kind to her. In "
    "the afternoon the wind turned and brought rain, and she climbed the narrow stairs to the lamp room to wait. The "
    "glass was whole. The great lens stood in the middle of the floor, covered with a sheet, and when she lifted one "
    "corner the grey light of the sea broke into small rainbows along the wall. She counted the steps on her way down: "
    "ninety-six. The next day she did not buy white paint. She went to the chemist, to the school and to the old "
    "boatyard, and in each place she asked whether anybody still had a paper bag of blue. "
    "The chemist laughed and gave her a cough sweet. The teacher let her look through a cupboard full of dried chalk "
    "and broken rulers, and promised to ask the parents. But at the boatyard an old woman put down her plane, wiped "
    "her hands on her apron without a word, and led Marta to a shelf behind the steam box. There, wrapped in a page of "
    "a newspaper from before the war, lay two small bags, still tied with string. "
)
MESSAGES: dict[str, list[dict[str, str]]] = {
    "sky": [{"role": "user", "content": "Why is the sky blue?"}],
    "list": [{"role": "user", "content": "Name three fruits and say one thing about each."}],
    "code": [{"role": "user", "content": "Write a Python function that returns the sum of the squares of a list."}],
    "sum": [{"role": "user", "content": "What is 17 + 25? Answer with the number only."}],
    "system": [{"role": "system", "content": "You answer in one short sentence."},
               {"role": "user", "content": "What does a baker do?"}],
    "turns": [{"role": "user", "content": "My name is Ada."}, {"role": "assistant", "content": "Hello Ada!"},
              {"role": "user", "content": "Write a two-line poem that has my name in it 🙂"}],
    "medium": [{"role": "user", "content": "Retell this in two sentences: " + STORY.strip()}],
    "long": [{"role": "user", "content": "Read the story. " + STORY + MORE
              + "Write what happens next."}],
}


def cases(tokenizer: Any) -> list[dict[str, Any]]:
    """All prompts with their ids, shortest kind first."""
    found: list[dict[str, Any]] = [{"name": "one-token", "prompt_ids": [504], "max_new_tokens": 48}]
    text = "The three primary colours are"
    found.append({"name": "raw-text", "text": text, "prompt_ids": tokenizer.encode(text), "max_new_tokens": 48})
    for name, messages in MESSAGES.items():
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        found.append({"name": name, "messages": messages, "prompt_ids": ids, "max_new_tokens": 64})
    return found


@torch.inference_mode()
def decode(model: Any, tokenizer: Any, case: dict[str, Any]) -> dict[str, Any]:
    """The case with what the model makes of it."""
    ids = torch.tensor([case["prompt_ids"]])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=case["max_new_tokens"], do_sample=False,
        eos_token_id=EOS, pad_token_id=EOS, output_logits=True, return_dict_in_generate=True,
    )
    tokens = out.sequences[0, ids.shape[1]:].tolist()
    best = torch.stack(out.logits)[:, 0].topk(2).values
    return {
        **case, "token_ids": tokens, "finish_reason": "stop" if tokens[-1] == EOS else "length",
        "text_out": tokenizer.decode(tokens, skip_special_tokens=True),
        "gaps": [round(gap, 5) for gap in (best[:, 0] - best[:, 1]).tolist()],
    }


def main() -> None:
    """Write one case a line."""
    torch.set_num_threads(2)
    path = pathlib.Path(sys.argv[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    lines = [json.dumps(decode(model, tokenizer, case)) for case in cases(tokenizer)]
    pathlib.Path(__file__).with_name("smollm2_greedy.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
