"""Tokenizers from Hugging Face folders: which file speaks for what, and clear refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from dflash_jax.errors import UserError
from dflash_jax.text import Tokenizer, load_tokenizer

from . import tiny


@pytest.fixture
def folder(tmp_path: Path, backend: tokenizers.Tokenizer) -> Path:
    return tiny.write_folder(tmp_path / "model", backend, bos_token="<|im_start|>", eos_token="<|im_end|>")


def test_a_folder_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    tiny.write_json(tmp_path / "config.json", {"eos_token_id": 2})
    assert load_tokenizer(tmp_path) is None


def test_load_tokenizer_takes_the_folder(folder: Path) -> None:
    loaded = load_tokenizer(folder)
    assert loaded is not None
    assert (loaded.bos_token_id, loaded.eos_token_ids, loaded.pad_token_id) == (1, (2,), None)
    assert loaded.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert loaded.source == str(folder) and loaded.chat_template is None


def test_special_tokens_may_be_objects(folder: Path) -> None:
    tiny.write_json(folder / "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>", "lstrip": False}})
    assert Tokenizer.from_folder(folder).eos_token_ids == (2,)


def test_special_tokens_map_speaks_only_without_added_tokens_decoder(folder: Path) -> None:
    tiny.write_json(folder / "special_tokens_map.json", {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"})
    assert Tokenizer.from_folder(folder).special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    tiny.write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>", "added_tokens_decoder": {}})
    assert Tokenizer.from_folder(folder).special_tokens == {"eos_token": "<|im_end|>"}


def test_tokens_only_the_config_knows_are_added(folder: Path) -> None:
    decoder = {
        "421": {"content": "<tool>", "special": False, "normalized": False},
        "420": {"content": "<a>", "special": True},
    }
    config = {"added_tokens_decoder": decoder, "additional_special_tokens": ["<b>"], "pad_token": "<pad>"}
    tiny.write_json(folder / "tokenizer_config.json", config)
    made = Tokenizer.from_folder(folder)
    assert made.encode("<a><tool><pad><b>") == [420, 421, 422, 423], "listed, then named, then unnamed"
    assert made.special_ids == {0, 1, 2, 420, 422, 423}
    assert made.vocab_size == 424 and made.pad_token_id == 422


def test_flags_of_the_config_win(folder: Path) -> None:
    """A token that swallows the space on its left does so even if tokenizer.json says otherwise."""
    assert Tokenizer.from_folder(folder).encode("a <|im_end|>") != [*Tokenizer.from_folder(folder).encode("a"), 2]
    token = {"content": "<|im_end|>", "lstrip": True, "normalized": False, "special": True}
    tiny.write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": {"2": token}})
    made = Tokenizer.from_folder(folder)
    assert made.encode("a <|im_end|>") == [*made.encode("a"), 2]


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, (2,)),
        ({"eos_token_id": 0}, None, (2, 0)),
        ({"eos_token_id": [0, 2, 7]}, {"eos_token_id": 9}, (2, 0, 7)),
        ({"do_sample": True}, {"eos_token_id": 9}, (2,)),
        (None, {"eos_token_id": 9}, (2, 9)),
    ],
)
def test_stop_tokens(folder: Path, generation: dict | None, config: dict | None, expected: tuple[int, ...]) -> None:
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            tiny.write_json(folder / name, value)
    assert Tokenizer.from_folder(folder).eos_token_ids == expected


BOS_BEFORE = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])


@pytest.mark.parametrize(
    ("post", "flags", "around"),
    [
        (None, {}, ([], [])),
        (BOS_BEFORE, {}, ([1], [])),
        (BOS_BEFORE, {"add_bos_token": True}, ([1], [])),
        (BOS_BEFORE, {"add_bos_token": False}, ([], [])),
        (BOS_BEFORE, {"add_eos_token": True}, ([1], [2])),
        (None, {"add_bos_token": True, "add_eos_token": True}, ([1], [2])),
        (None, {"add_bos_token": None}, ([], [])),
    ],
)
def test_bos_and_eos(tmp_path: Path, post: processors.PostProcessor | None, flags: dict, around: tuple) -> None:
    backend = tiny.trained()
    if post is not None:
        backend.post_processor = post  # pyright: ignore[reportAttributeAccessIssue]
    made = Tokenizer.from_folder(
        tiny.write_folder(tmp_path, backend, bos_token="<|im_start|>", eos_token="<|im_end|>", **flags)
    )
    bare = made.encode("the sky", add_special_tokens=False)
    assert bare and made.encode("the sky") == [*around[0], *bare, *around[1]]


def test_a_flag_without_its_token_changes_nothing(tmp_path: Path, backend: tokenizers.Tokenizer) -> None:
    made = Tokenizer.from_folder(tiny.write_folder(tmp_path, backend, add_bos_token=True))
    assert made.encode("the sky") == backend.encode("the sky").ids


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = tiny.trained()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    made = Tokenizer.from_folder(tiny.write_folder(tmp_path, backend))
    assert made.decode(made.encode("Why is the sky blue?")) == "Why is the sky blue?"


def test_chat_templates(folder: Path) -> None:
    named = [{"name": "default", "template": "config"}, {"name": "rag", "template": "R"}]
    tiny.write_json(folder / "chat_template.json", {"chat_template": "old"})
    assert Tokenizer.from_folder(folder).chat_template == "old"
    tiny.write_json(folder / "tokenizer_config.json", {"chat_template": named})
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "config", "rag": "R"}
    (folder / "chat_template.jinja").write_text("file\n", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T", encoding="utf-8")
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "file\n", "rag": "R", "tool_use": "T"}


def test_cleaning_up_is_for_word_pieces_only(tmp_path: Path, backend: tokenizers.Tokenizer) -> None:
    flag = {"clean_up_tokenization_spaces": True}
    pieces = tiny.word_pieces(decoders.WordPiece("##", cleanup=False))
    words = Tokenizer.from_folder(tiny.write_folder(tmp_path / "words", pieces, **flag))
    assert words.decode(words.encode("the run .", False)) == "the run."
    plain = Tokenizer.from_folder(tiny.write_folder(tmp_path / "plain", pieces))
    assert plain.decode(plain.encode("the run .", False)) == "the run ."
    bpe = Tokenizer.from_folder(tiny.write_folder(tmp_path / "bpe", backend, **flag))
    assert bpe.decode(bpe.encode("the sky .")) == "the sky ."


def test_ids_outside_the_vocabulary_decode_to_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the sky")
    assert tokenizer.decode([*ids, 5000, 420]) == "the sky"


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"lone surrogate U\+D83D at position 2"):
        tokenizer.encode("ab\ud83d")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{not json", "tokenizer.json is not valid JSON"),
        ("tokenizer.json", "[]", "tokenizer.json holds a list, not a JSON object"),
        ("tokenizer.json", '{"model": {"type": "Martian"}}', "tokenizer.json: not a usable tokenizer"),
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json: not UTF-8 text"),
        ("tokenizer_config.json", '{"a": ', "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "3", "tokenizer_config.json holds a int, not a JSON object"),
        ("tokenizer_config.json", '{"eos_token": 2}', "eos_token is 2, neither a string nor an object"),
        ("tokenizer_config.json", '{"add_bos_token": 1}', "add_bos_token is 1, not true or false"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "y"}}', "whose keys are token ids"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"5": 1}}', r"added_tokens_decoder\[5\] is 1"),
        ("tokenizer_config.json", '{"extra_special_tokens": "ab"}', "extra_special_tokens is 'ab', not a list"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template is neither"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', "chat_template is neither"),
        ("special_tokens_map.json", "nope", "special_tokens_map.json is not valid JSON"),
        ("generation_config.json", '{"eos_token_id": "2"}', r"eos_token_id is \['2'\], not token ids"),
        ("generation_config.json", "{", "generation_config.json is not valid JSON"),
        ("chat_template.jinja", b"\xe9", "chat_template.jinja: not UTF-8 text"),
    ],
)
def test_wrong_files_are_named(folder: Path, file: str, content: str | bytes, message: str) -> None:
    (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer.from_folder(folder)
    assert "\n" not in str(caught.value)


def test_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(UserError, match="no tokenizer.json; it has tokenizer.model, which must be converted first"):
        load_tokenizer(tmp_path)


def test_word_level_tokenizers_load(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 5, "?": 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    made = Tokenizer.from_folder(tiny.write_folder(tmp_path, backend))
    assert made.encode("a b z") == [0, 5, 1]
    assert made.vocab_size == 6, "one more than the largest id, not the number of tokens"
