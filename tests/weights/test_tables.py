"""Name tables: the names themselves, and that the pieces of every parameter fill it exactly once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_jax.config import read_draft, read_target
from dflash_jax.models.decoder import decoder_specs
from dflash_jax.models.dflash import draft_specs
from dflash_jax.params import walk
from dflash_jax.weights.tables import Table, draft_table, gguf_target_table, hf_target_table

from .tiny import DRAFT, DRAFT2, LLAMA, QWEN3, draft_tensors, target_tensors

BIASED = {"attention_bias": True, "mlp_bias": True}


def _target(config: dict[str, Any], scheme: str) -> tuple[Any, Table]:
    read = read_target("t", config)
    table = hf_target_table(read) if scheme == "hf" else gguf_target_table(read, scheme == "permuted")
    return decoder_specs(read), table


def _draft(config: dict[str, Any]) -> tuple[Any, Table]:
    read = read_draft("d", config, read_target("t", QWEN3))
    return draft_specs(read), draft_table(read)


TABLES = {
    "llama": _target({**LLAMA, **BIASED}, "hf"),
    "llama-tied": _target({**LLAMA, "tie_word_embeddings": True}, "hf"),
    "llama-gguf": _target({**LLAMA, **BIASED}, "permuted"),
    "qwen3": _target({**QWEN3, **BIASED}, "hf"),
    "qwen3-gguf": _target(QWEN3, "gguf"),
    "draft": _draft(DRAFT),
    "draft-biased": _draft({**DRAFT, "attention_bias": True}),
    "draft2": _draft(DRAFT2),
}


@pytest.mark.parametrize("name", TABLES)
def test_pieces_fill_every_parameter_exactly_once(name: str):
    specs, table = TABLES[name]
    declared = dict(walk(specs))
    assert set(table.pieces) == set(declared)
    for path, spec in declared.items():
        filled = np.zeros(spec.shape, int)
        for piece in table.pieces[path]:
            assert np.prod(piece.shape) == np.prod(piece.split), path
            assert piece.shape[0] % piece.split[0] == 0, path
            view = filled[piece.index].reshape(piece.filled)
            assert np.shares_memory(view, filled), path
            view += 1
        assert (filled == 1).all(), path


@pytest.mark.parametrize("name", TABLES)
def test_no_tensor_is_used_twice(name: str):
    _, table = TABLES[name]
    names = [name for pieces in table.pieces.values() for piece in pieces for name in piece.names]
    assert len(names) == len(set(names))


def _names(table: Table) -> set[str]:
    return {piece.names[0] for pieces in table.pieces.values() for piece in pieces}


def test_names_are_those_of_checkpoints():
    assert _names(TABLES["llama"][1]) == set(target_tensors(LLAMA, biases=True))
    assert _names(TABLES["llama-tied"][1]) == set(target_tensors({**LLAMA, "tie_word_embeddings": True}))
    assert _names(TABLES["qwen3"][1]) == set(target_tensors(QWEN3, biases=True))
    assert _names(TABLES["draft"][1]) == set(draft_tensors(DRAFT))
    assert _names(TABLES["draft2"][1]) == set(draft_tensors(DRAFT2))


def test_gguf_names():
    first = {name.removeprefix("blk.0.") for name in _names(TABLES["qwen3-gguf"][1]) if not name.startswith("blk.1.")}
    assert first == {
        "token_embd.weight", "output_norm.weight", "output.weight", "attn_norm.weight", "ffn_norm.weight",
        "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight", "attn_q_norm.weight",
        "attn_k_norm.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight",
    }  # fmt: skip
