"""How byte-level BPE families cut text into words before their merges run.

A GGUF file does not hold the cutting rules; it only names them in `tokenizer.ggml.pre`. The names
below are the ones llama.cpp writes, grouped as its table groups them; the patterns are those of the
families' own published tokenizer.json files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenizers import Regex, normalizers, pre_tokenizers

from dflash_jax.errors import UserError


@dataclass(frozen=True)
class Family:
    """The text side of one tokenizer family.

    splits: patterns applied one after the other; each cuts the pieces left by the one before, and
        both the matches and what lies between them become pieces.
    nfc: text is brought to Unicode normal form C first.
    ignore_merges: a piece that is itself in the vocabulary is taken whole.
    add_bos: a prompt starts with the bos token unless the file says otherwise.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.splits]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_DIGIT = r"\p{N}"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|" + _SPACES
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES


def _cl100k(digits: str) -> str:
    """The pattern that Llama 3 and Qwen share but for how many digits stay together."""
    return rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"


def _cased(suffix: str, digits: str) -> str:
    """The GPT-4o pattern: words end where capitals start again."""
    lead, marks = r"[^\r\n\p{L}\p{N}]?", r"\p{Lm}\p{Lo}\p{M}"
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}{marks}]", rf"[\p{{Ll}}{marks}]"
    words = rf"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"


_QWEN35 = (
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
)
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _LINES
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|" + _SPACES
_SEED_CODER = rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
_FALCON_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_THREE_DIGITS = "[0-9][0-9][0-9]"
_HAN_OR_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_CODER_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

_WORDS = Family((_GPT2,))
_DIGITS_APART = Family((_DIGIT, _GPT2))
_LLAMA3 = Family((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_LLAMA3_MERGING = Family(_LLAMA3.splits)
_QWEN2 = Family((_cl100k(_DIGIT),))
_GPT4O = Family((_cased(f"{_SUFFIX}?", r"\p{N}{1,3}"),))
_DEEPSEEK3 = Family((r"\p{N}{1,3}", _HAN_OR_KANA, _DEEPSEEK_WORDS))
_BAILING_MOE = Family((_BAILING,))

_GROUPS: tuple[tuple[Family, str], ...] = (
    (_DIGITS_APART, "smollm starcoder refact codeshell exaone minerva-7b mellum2"),
    (replace(_DIGITS_APART, nfc=True), "command-r"),
    (_WORDS, "gpt-2 phi-2 gigachat a.x-4.0 mellum jais trillion exaone4 granite-docling"),
    (replace(_WORDS, nfc=True), "olmo mpt"),
    (_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (_LLAMA3_MERGING, "dbrx smaug-bpe glm4 chatglm-bpe"),
    (replace(_QWEN2, nfc=True), "qwen2 deepseek-r1-qwen"),
    (_QWEN2, "stablelm2 megrez hunyuan solar-open grok-2 kormo f2llmv2"),
    (Family((_QWEN35,), nfc=True), "qwen35"),
    (_GPT4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (Family((_cased("", _DIGIT),), ignore_merges=True, add_bos=True), "tekken"),
    (_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm"),
    (Family((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CODER_CJK, _DIGIT)), "deepseek-coder"),
    (_BAILING_MOE, "bailingmoe bailingmoe2 llada-moe"),
    (Family((_SEED_CODER,)), "seed-coder"),
    (Family((_FALCON_PUNCTUATION, _GPT2, _THREE_DIGITS)), "falcon"),
    (Family((_PUNCTUATION, _GPT2, r"\p{N}+", _THREE_DIGITS)), "default"),
)
FAMILIES: dict[str, Family] = {name: family for family, names in _GROUPS for name in names.split()}


def family_named(name: str, source: str) -> Family:
    """The family that `tokenizer.ggml.pre` names; UserError with the known names otherwise."""
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(f"{source}: unknown tokenizer.ggml.pre {name!r} (known: {known})")
    return FAMILIES[name]
