"""Chat templates: a conversation to the text a model was trained on.

The template language and its helpers (``tojson``, ``raise_exception``, ``strftime_now``, the ``generation`` block) are
those that templates on model hubs are written for; the result equals transformers' ``apply_chat_template``. Templates
come with the model and are not trusted: jinja2's immutable sandbox runs them, on plain JSON data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from halfbyte.errors import CheckpointError, DataError

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """A compiled template.

    Arguments:
        source: jinja2 text.
        where: file name for messages.
    Raises:
        CheckpointError: the text is not a valid template.
    """

    def __init__(self, source: str, where: str = "chat template") -> None:
        self.source, self.where = source, where
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError, ValueError, OverflowError) as error:
            # The last four come from Python's compiler, which has limits of its own on what a template becomes.
            raise CheckpointError(f"the chat template does not compile: {error}", where=where) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation.

        Arguments:
            messages: each with a ``role``, mostly with a ``content``; JSON values only. A None value is left out.
            add_generation_prompt: end with the header of the assistant's next message.
            tools: JSON schemas of functions the model may call.
            variables: further names for the template, such as the special tokens or ``enable_thinking``.
        Raises:
            DataError: an empty conversation, a message without a role, or one the template refuses.
        """
        if not messages:
            raise DataError("the conversation is empty", expected="at least one message")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise DataError(
                    f"message {index} has no role: {message!r}", expected='{"role": "user", "content": "..."}'
                )
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        values = {**(variables or {}), "messages": present, "tools": list(tools) if tools is not None else None}
        try:
            plain = json.loads(json.dumps(values))  # no object with methods reaches the template
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"the conversation is not JSON: {error}", expected="strings, numbers, lists, objects"
            ) from error
        try:
            return self._template.render(**plain, documents=None, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # the template is a program of somebody else's
            raise DataError(
                f"the chat template refuses the conversation: {error}",
                where=self.where,
                fix="check the roles, their order, and which keys the template reads",
            ) from error


class _GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the assistant wrote; it renders as its inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own protocol

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope, as transformers gives it: assignments inside do not leak out.
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML; templates expect plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
