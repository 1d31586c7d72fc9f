r"""Write smollm2_golden.json: token ids of the demo target's tokenizer, from transformers.

    python tests/text/make_smollm2_golden.py FOLDER/SmolLM2-135M-Instruct.Q4_1.gguf

Needs transformers (5.15.0 was used), torch and accelerate; the project itself needs none of them.

A GGUF file only names the rule that cuts text into words ("smollm": every digit by itself, then GPT-2's words).
transformers reads the file as a Llama 3 one and leaves the digit rule out. So there are two lists: `ids`, with the
rule put back, are those of the model's original tokenizer; `transformers_ids`, only where it differs, is what
transformers gives for the file as it is. They differ where white space or a lone space meets a digit: "a  1", "\n\n1".
"""

import json
import pathlib
import sys

import tokenizers
import transformers
from tokenizers import pre_tokenizers

TEXTS = [
    "",
    " ",
    "\n",
    "\n\n\n",
    "Hello, world!",
    "Why is the sky blue?",
    "What is 12*(3+4)-5^2? In 2024, 1,234,567.89 people.",
    "don't I'll we've they're she'd I'm it's DON'T WE'LL",
    "  leading,  double   triple    spaces and trailing  ",
    "def f(x):\n    if x > 10:\n\t\treturn x**2  # done\n\n\n    pass",
    'for (int i=0;i<100;i++){ printf("%d\\n", a[i]); }',
    '{"a": [1, 2.5, null], "b": "x\\ty"}',
    "https://example.com/a?b=c&d=10#e user@host.org /usr/lib/x86_64",
    "snake_case camelCase HTTPServer v1.2.3-beta+45 0xFF 1e-5",
    "a 1",
    "a  1",
    "a   12  34",
    "\n1",
    "\n\n1",
    "1. one\n2. two\n\n3. three\n\n\n10. ten",
    "\r\n windows\r\n\r\n1 lines\t2",
    "½ ² ³ Ⅷ ① ٣ १२३",
    "你好，世界！今天是2024年5月1日。",
    "こんにちは世界。カタカナと漢字、ﾊﾝｶｸ",
    "안녕하세요 세계",
    "Привет, мир! Ελληνικά. עברית. مرحبا ١٢٣",
    "नमस्ते दुनिया ไทย Tiếng Việt",
    "Café déjà vu naïve Straße Ñandú",
    "e\u0301 and \u1e9b\u0323 stay as they are",
    "🤷🏽\u200d♀️👨\u200d👩\u200d👧🇩🇪 😀x🎉🎊",
    "\u00a0nbsp\u00a0\u2003em\u3000wide\u200bzero\ufeff",
    "∑∫√ ≤≥≠ → ⇒ “quoted” ‘single’ … — –",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text <|im_end|> inside<|endoftext|>",
    "<repo_name>a/b<file_sep>c.py\n<jupyter_code>x = 1<empty_output>",
    "<|im_ start|> <|im_end| ><im_end>",
    "!!!??? ... ---- ==== $100 €20 50% #tag @you",
    "A" * 30 + " " * 30 + "0" * 30,
]
CHATS = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Give two fruits."},
        {"role": "assistant", "content": "Apple, pear."},
        {"role": "user", "content": "And 2 more?"},
    ],
]


def _case(fixed: tokenizers.Tokenizer, plain: tokenizers.Tokenizer, text: str) -> dict[str, object]:
    ids, theirs = fixed.encode(text).ids, plain.encode(text).ids
    case: dict[str, object] = {"text": text, "ids": ids}
    return case if ids == theirs else {**case, "transformers_ids": theirs}


def main(path: pathlib.Path) -> None:
    loaded = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    plain = loaded.backend_tokenizer
    fixed = tokenizers.Tokenizer.from_str(plain.to_str())
    fixed.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    chats = [
        {
            "messages": messages,
            "text": loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False),
            "ids": list(loaded.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)),
        }
        for messages in CHATS
    ]
    lines = [json.dumps(_case(fixed, plain, text), ensure_ascii=False) for text in TEXTS]
    talks = [json.dumps(chat, ensure_ascii=False) for chat in chats]
    body = '{"texts": [\n' + ",\n".join(lines) + '\n],\n"chats": [\n' + ",\n".join(talks) + "\n]}\n"
    pathlib.Path(__file__).with_name("smollm2_golden.json").write_text(body, encoding="utf-8")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
