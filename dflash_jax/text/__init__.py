"""Text in and out: tokenizers, chat templates, incremental decoding. Nothing here imports jax."""

from dflash_jax.text.chat import encode_chat, render_chat
from dflash_jax.text.detokenize import IncrementalDetokenizer
from dflash_jax.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "encode_chat", "load_tokenizer", "render_chat"]
