"""Tiny tokenizers made on the spot: byte-level BPE trained on a few lines, in both formats, and others by hand."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "Why is the sky blue? Because the light is scattered by the air, and they're small, don't you think?",
    "def area(width, height):\n    if width < 0:\n        raise ValueError('width 12')\n    return width * height\n",
    "1. one\n2. two\n\n3. three  and 1234567890 and 3.14159\n\n\n",
    "你好，世界！今天天气很好。こんにちは世界。Привет мир. Café déjà vu, naïve résumé. 😀😀 🎉",
)
# What tokenizers get wrong first: spaces before digits, blank lines, contractions, marks, specials inside text.
TEXTS = (
    "",
    " ",
    "Hello, world!",
    "a 1  2   34\n\n5",
    "\n\n1. x\r\n\r\n2. y\n",
    "  leading and trailing  ",
    "they're, THEY'RE, don't; I'll 'quote'",
    "def f(x):\n\treturn x*10 # ok\n\n\n    pass",
    "½ ² Ⅷ ٣ १२३ 2024年5月1日",
    "你好，世界！ 안녕하세요 Привет",
    "e\u0301 ＡＢＣ \u00a0nbsp\u2003em \u200d",
    "🤷🏽\u200d♀️ 😀x👍🏽",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|><|im_start|",
    "snake_case camelCase HTTPServer x==y&&z !!! ... $100",
    "\x00\x16\x7f\ufffd\U0010ffff",
)


def with_pre_tokenizer(name: str, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Give a tokenizer the parts that the family's published tokenizer.json has."""
    backend.normalizer = normalizers.NFC() if name == "qwen2" else None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name in ("smollm", "gpt-2"))
    before = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "gpt-2": [],
        "qwen2": [_split(r"\p{N}")],
        "llama-bpe": [_split(r"\p{N}{1,3}")],
    }[name]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level])
    return backend


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Split(Regex(pattern), "isolated", invert=False)


def trained(name: str = "smollm") -> tokenizers.Tokenizer:
    """A byte-level BPE of 420 tokens that covers every byte."""
    backend = with_pre_tokenizer(name, tokenizers.Tokenizer(models.BPE(ignore_merges=name == "llama-bpe")))
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def write_folder(folder: Path, backend: tokenizers.Tokenizer, **config: object) -> Path:
    """A Hugging Face folder with the tokenizer and a tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", config)
    return folder


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def metadata(backend: tokenizers.Tokenizer, pre: str = "smollm", **extra: object) -> dict[str, object]:
    """The GGUF key-value pairs of a trained tokenizer; `extra` goes in under `tokenizer.ggml.`."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    fields: dict[str, object] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **extra,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()} | {"tokenizer.chat_template": TEMPLATE}


def write_gguf(path: Path, fields: dict[str, object]) -> Path:
    """A GGUF file that holds these pairs and no tensors."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, str(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Llama-2's shape: byte tokens for what is not in the vocabulary, a space put first and taken off again."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "a", "b", "▁a", "ab", "你", "▁▁ab", "'", "n", "."]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "▁"), ("▁", "a"), ("a", "b"), ("▁▁", "ab")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in pieces[:3]])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def word_pieces(decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    """A word-level vocabulary with the odd pieces that decoders treat specially."""
    pieces = [
        "[UNK]",
        "[SEP]",
        "the",
        "##ing",
        "##s",
        "run",
        "n't",
        "'s",
        "'",
        ".",
        ",",
        "!",
        "▁",
        "▁▁",
        "▁run",
        "e</w>",
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[SEP]"])
    backend.decoder = decoder  # pyright: ignore[reportAttributeAccessIssue]
    return backend
