"""Chat messages to prompt text, with the model's own Jinja template.

Templates come with the model and are not trusted: they run in Jinja's immutable sandbox. The
environment (block trimming, filters, globals) is the one that templates on the Hugging Face hub are
written for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_jax.errors import UserError
from dflash_jax.text.tokenizer import Tokenizer

Message = Mapping[str, object]

# What running a template can raise besides Jinja's own errors: plain Python errors of its expressions.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)


def render_chat(
    template: str,
    messages: Sequence[Message],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    **extra: object,
) -> str:
    """The prompt text of a conversation.

    special_tokens: template variables such as bos_token. extra: further ones (tools, enable_thinking).
    Raises UserError for malformed messages and for whatever goes wrong in the template.
    """
    check_messages(messages)
    variables = {"tools": None, "documents": None, **special_tokens, **extra}
    try:
        return _compile(template).render(
            messages=list(messages), add_generation_prompt=add_generation_prompt, **variables
        )
    except _TEMPLATE_ERRORS as error:
        raise UserError(f"the chat template failed: {_one_line(error)}") from error


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True, **extra: object
) -> list[int]:
    """Token ids of a conversation. The template writes bos itself, so none is added here."""
    template = tokenizer.chat_template
    if template is None:
        names = sorted(tokenizer.chat_templates)
        known = f" named 'default' (it has {', '.join(names)})" if names else ""
        raise UserError(f"{tokenizer.source}: the tokenizer has no chat template{known}; give the prompt as plain text")
    text = render_chat(template, messages, tokenizer.special_tokens, add_generation_prompt, **extra)
    return tokenizer.encode(text, add_special_tokens=False)


def check_messages(messages: object) -> None:
    """UserError unless this is a non-empty list of {"role", "content"} objects."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise UserError(f"messages must be a non-empty list of objects with role and content, not {messages!r:.80}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UserError(f"messages[{index}] is {message!r:.80}, not an object with role and content")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise UserError(f"messages[{index}].role is {role!r:.80}, not a non-empty string")
        _check_content(index, message)


def _check_content(index: int, message: Message) -> None:
    """Content is text or a list of parts; a message that only calls tools may leave it out."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return
    is_parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
    if not isinstance(content, str) and not is_parts:
        raise UserError(f"messages[{index}].content is {content!r:.80}, not a string")


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is only a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape HTML characters, and models were not trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _one_line(error: Exception) -> str:
    """The error as part of a sentence; syntax errors say where."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"line {error.lineno}: {text}" if isinstance(error, jinja2.TemplateSyntaxError) else text
