"""Tokenizers from GGUF metadata: the same ids as the folder of the same tokenizer, and clear refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex

from dflash_jax.config.gguf_header import read_gguf_header
from dflash_jax.errors import UserError
from dflash_jax.text import Tokenizer, load_tokenizer
from dflash_jax.text.pretokenizers import FAMILIES

from . import tiny


@pytest.mark.parametrize("name", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_folder_and_gguf_give_the_same_ids(name: str, tmp_path: Path) -> None:
    backend = tiny.trained(name)
    folder = Tokenizer.from_folder(tiny.write_folder(tmp_path / "folder", backend))
    fields = tiny.metadata(backend, name, add_bos_token=False)
    file = Tokenizer.from_gguf(tiny.write_gguf(tmp_path / "model.gguf", fields))
    for text in tiny.TEXTS:
        ids = folder.encode(text)
        assert file.encode(text) == ids, text
        for skip in (True, False):
            assert file.decode(ids, skip) == folder.decode(ids, skip)
    assert file.vocab_size == folder.vocab_size == 420
    assert file.special_ids == folder.special_ids == {0, 1, 2}


def test_families_cut_differently() -> None:
    """The test above would pass with one rule for all if these did not differ."""
    cuts = {
        name: [text for text, _ in FAMILIES[name].pre_tokenizer().pre_tokenize_str("it'S  12345\n\n6")]
        for name in ("smollm", "gpt-2", "qwen2", "llama-bpe")
    }
    assert cuts == {
        "smollm": ["it", "'", "S", "ĠĠ", "1", "2", "3", "4", "5", "ĊĊ", "6"],
        "gpt-2": ["it", "'", "S", "Ġ", "Ġ12345", "Ċ", "Ċ", "6"],
        "qwen2": ["it", "'S", "Ġ", "Ġ", "1", "2", "3", "4", "5", "ĊĊ", "6"],
        "llama-bpe": ["it", "'S", "Ġ", "Ġ", "123", "45", "ĊĊ", "6"],
    }


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_keeps_all_of_the_text(name: str) -> None:
    family = FAMILIES[name]
    assert all(Regex(pattern) for pattern in family.splits)
    for text in tiny.TEXTS:
        normal = family.normalizer().normalize_str(text) if family.nfc else text  # pyright: ignore[reportOptionalMemberAccess]
        pieces = family.pre_tokenizer().pre_tokenize_str(normal)
        ends = [end for _, (_, end) in pieces]
        starts = [start for _, (start, _) in pieces]
        assert starts == [0, *ends][: len(starts)]
        assert not normal or ends[-1] == len(normal)


def test_merged_words_are_taken_whole_where_the_family_says_so(backend: tokenizers.Tokenizer) -> None:
    fields = tiny.metadata(backend)
    key = "tokenizer.ggml.tokens"
    word = {key: [*fields[key], "zqzq"], "tokenizer.ggml.token_type": [*fields["tokenizer.ggml.token_type"], 1]}  # pyright: ignore
    assert Tokenizer.from_gguf_metadata(fields | word | {"tokenizer.ggml.pre": "llama-bpe"}).encode("zqzq", False) == [
        420
    ]
    assert len(Tokenizer.from_gguf_metadata(fields | word | {"tokenizer.ggml.pre": "smaug-bpe"}).encode("zqzq")) == 4


def test_token_types(backend: tokenizers.Tokenizer) -> None:
    """Control and user-defined tokens are found in text; only control ones are special; unused ones are nothing."""
    fields = tiny.metadata(backend)
    tokens = [*fields["tokenizer.ggml.tokens"], "<tool>", "<ctl>", "<what>", "[PAD423]"]  # pyright: ignore
    types = [*fields["tokenizer.ggml.token_type"], 4, 3, 2, 5]  # pyright: ignore
    made = Tokenizer.from_gguf_metadata(fields | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    assert made.encode("<tool><ctl><what>") == [420, 421, 422]
    assert made.decode([420, 421, 422]) == "<tool>"
    assert made.special_ids == {0, 1, 2, 421, 422}
    assert made.decode([423]) == "" and made.id_to_token(423) is None


def test_without_token_types_the_named_tokens_are_special(backend: tokenizers.Tokenizer) -> None:
    fields = tiny.metadata(backend)
    del fields["tokenizer.ggml.token_type"]
    made = Tokenizer.from_gguf_metadata(fields)
    assert made.special_ids == {1, 2}
    assert made.encode("<|im_start|>") == [1]


def test_names_and_templates(backend: tokenizers.Tokenizer) -> None:
    fields = tiny.metadata(backend, unknown_token_id=0, padding_token_id=2, eot_token_id=0)
    made = Tokenizer.from_gguf_metadata(fields | {"tokenizer.chat_template.tool_use": "T"})
    assert made.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert (made.bos_token_id, made.eos_token_ids, made.pad_token_id, made.unk_token_id) == (1, (2, 0), 2, 0)
    assert made.chat_template == tiny.TEMPLATE
    assert made.chat_templates == {"default": tiny.TEMPLATE, "tool_use": "T"}


@pytest.mark.parametrize(
    ("pre", "flags", "around"),
    [
        ("smollm", {}, ([], [])),
        ("llama-bpe", {}, ([1], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, ([1], [2])),
    ],
)
def test_bos_and_eos(backend: tokenizers.Tokenizer, pre: str, flags: dict, around: tuple[list, list]) -> None:
    made = Tokenizer.from_gguf_metadata(tiny.metadata(backend, pre, **flags))
    bare = made.encode("the sky", add_special_tokens=False)
    assert bare and made.encode("the sky") == [*around[0], *bare, *around[1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "llama"}, r"model is 'llama': only byte-level BPE"),
        ({"model": None}, r"model is None"),
        ({"pre": "martian"}, r"unknown tokenizer.ggml.pre 'martian' \(known: .*llama-bpe.*smollm"),
        ({"pre": None}, r"pre is missing"),
        ({"tokens": None}, r"tokens is missing"),
        ({"tokens": "a"}, r"tokens is 'a', not list"),
        ({"merges": None}, r"merges is missing"),
        ({"merges": ["ab"]}, r"merges\[0\] is 'ab', not two tokens"),
        ({"merges": ["a 你"]}, r"merges\[0\] \('a', '你'\) is not made of tokens"),
        ({"merges": [3]}, r"merges\[0\] is 3, not str"),
        ({"token_type": [1, 2]}, r"token_type has 2 entries for 420 tokens"),
        ({"eos_token_id": 420}, r"eos_token_id is 420, outside the 420 tokens"),
        ({"bos_token_id": True}, r"bos_token_id is True, not int"),
        ({"bos_token_id": None, "add_bos_token": True}, r"add_bos_token is true, but .*bos_token_id is missing"),
        ({"add_bos_token": "yes"}, r"add_bos_token is 'yes', not bool"),
    ],
)
def test_wrong_metadata_is_named(backend: tokenizers.Tokenizer, change: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"^some.gguf: .*{message}"):
        Tokenizer.from_gguf_metadata(tiny.metadata(backend, **change), source="some.gguf")


def test_a_token_listed_twice(backend: tokenizers.Tokenizer) -> None:
    fields = tiny.metadata(backend)
    fields["tokenizer.ggml.tokens"][7] = fields["tokenizer.ggml.tokens"][9]  # pyright: ignore
    with pytest.raises(UserError, match="twice, as ids 7 and 9"):
        Tokenizer.from_gguf_metadata(fields)


def test_metadata_values_come_back(tmp_path: Path) -> None:
    fields: dict[str, object] = {"s": "é\n你", "n": 7, "b": True, "words": ["a", "", "ü"], "ints": [1, -2, 3]}
    read = read_gguf_header(tiny.write_gguf(tmp_path / "x.gguf", fields), arrays=True).pairs
    assert {key: read[key] for key in fields} == fields
    assert read["general.architecture"] == "llama"


def test_every_cut_of_a_file_is_one_sentence(backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
    whole = tiny.write_gguf(tmp_path / "x.gguf", tiny.metadata(backend)).read_bytes()
    part = tmp_path / "part.gguf"
    for length in [*range(0, 120), *range(120, len(whole) - 1, 97)]:
        part.write_bytes(whole[:length])
        with pytest.raises(UserError, match="part.gguf is not a usable GGUF file: ") as caught:
            Tokenizer.from_gguf(part)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 and so on", r"starts with b'PK"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(16), r"version 1 is not one of \(2, 3\)"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(16), r"version 50331648 is not one of"),
        (b"GGUF\x03\0\0\0" + bytes(8) + b"\xff" * 8 + bytes(8), r"unknown value type|truncated"),
        (b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(7) + b"\x01" + bytes(7) + b"\xffxxxx", r"utf-8"),
    ],
)
def test_files_that_are_not_gguf(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_gguf_header(path, arrays=True)


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read .*no.gguf: No such file"):
        Tokenizer.from_gguf(tmp_path / "no.gguf")
    with pytest.raises(UserError, match="no such model folder or GGUF file"):
        load_tokenizer(tmp_path / "no.gguf")


def test_load_tokenizer_takes_the_file(backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
    loaded = load_tokenizer(tiny.write_gguf(tmp_path / "x.gguf", tiny.metadata(backend)))
    assert loaded is not None and loaded.encode("the sky") == backend.encode("the sky").ids


@pytest.mark.parametrize("fields", [{"general.name": "x"}, {"tokenizer.ggml.model": "none"}])
def test_a_file_without_a_tokenizer_has_none(tmp_path: Path, fields: dict[str, object]) -> None:
    assert load_tokenizer(tiny.write_gguf(tmp_path / "x.gguf", fields)) is None
