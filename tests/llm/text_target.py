"""A recorded pair with a tokenizer around it, whose vocabulary is laid out so that a known output spells a known text.

The pair's second case decodes to a few odd tokens and then to nine that repeat.  Their pieces here are the bytes of
"b你xay😀", so that characters of three and four bytes lie inside blocks and across rounds:

    tokens  1 | 54 15 | 56 34 48 | 30 | 69 | 42 | 32 56 34 7 61 20 52 69 42 32 56 34 | 7 61 20 52 …    (| = round)
    text      | h  i  | �  xay ! |    | b  | 你…       xay 😀………    b  你…     xay | 😀………
"""

from __future__ import annotations

import json
import shutil
import string
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from .pairs import FOLDER, Case, read_cases

PAIR = FOLDER / "x-v2-one-layer"
BLOCK_SIZE = 12
VOCABULARY = 71
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
EOS = 2
CYCLE = [7, 61, 20, 52, 69, 42, 32, 56, 34]
SPELT = {54: "h", 15: "i", 48: "!", 30: " ", 69: "b", 34: "xay"}
BYTES = dict(zip((42, 32, 56, 7, 61, 20, 52), "你😀".encode(), strict=True))
START = "hi\ufffdxay! b"
PERIOD = "你xay😀b"


def known_case() -> Case:
    """The case whose output spells START and then PERIOD again and again."""
    return read_cases(PAIR.name)[1]


def known_prompt(tokens: int = 0) -> list[int]:
    """Its prompt, and so many of the tokens that follow: the output is then the rest."""
    case = known_case()
    return [*case.prompt_ids, *case.token_ids[:tokens]]


def write_text_target(folder: Path, **generation: object) -> Path:
    """The pair's target with tokenizer and chat template; `generation` goes to generation_config.json."""
    shutil.copytree(PAIR / "target", folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": SPECIALS[EOS], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return folder


def _tokenizer() -> tokenizers.Tokenizer:
    """Byte-level, without merges: one id a byte, as far as the ids go."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    special = {name: token for token, name in SPECIALS.items()}
    known = {token: spell.pre_tokenize_str(text)[0][0] for token, text in SPELT.items()}
    spelt_bytes = "".join(part for part, _ in spell.pre_tokenize_str("你😀"))
    known |= dict(zip(BYTES, spelt_bytes, strict=True))
    others = [char for char in string.ascii_lowercase + "\n.?,:'-" + string.digits + string.ascii_uppercase]
    spelt = [spell.pre_tokenize_str(char)[0][0] for char in others]
    free = [token for token in range(VOCABULARY) if token not in known and token not in SPECIALS]
    known |= dict(zip(free, [char for char in spelt if char not in known.values()], strict=False))
    vocab = special | {piece: token for token, piece in known.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = spell  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return backend
