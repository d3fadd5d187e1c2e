"""From a request's body to token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from halfbyte.errors import DataError
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.rollout.request import request_key
from halfbyte.serve.parameters import ChatBody, CompletionBody
from halfbyte.serve.problem import Problem

__all__ = ["chat_ids", "completion_ids", "prompt_key"]

#: Names that the template gets from elsewhere.
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "template"}


def prompt_key(ids: tuple[int, ...]) -> int:
    """The generator's key of a prompt: with the same seed, equal prompts draw equal tokens and others independent ones."""
    return request_key("serve", *ids)


def chat_ids(tokenizer: Tokenizer, body: ChatBody) -> list[tuple[int, ...]]:
    """The one prompt of a conversation, by the model's chat template.

    Raises:
        Problem: 400, the template refuses the conversation.
    """
    messages = [_plain(message, f"messages.{i}") for i, message in enumerate(body.messages)]
    variables = body.chat_template_kwargs or {}
    if taken := _RESERVED & variables.keys():
        raise Problem(400, f"'{min(taken)}' cannot be set here.", param="chat_template_kwargs")
    tools = body.tools if body.tools and body.tool_choice != "none" else None
    try:
        return [tuple(tokenizer.encode_chat(messages, tools=tools, **variables))]
    except DataError as error:
        raise Problem(400, _sentence(error), param="messages") from None


def completion_ids(tokenizer: Tokenizer, body: CompletionBody) -> list[tuple[int, ...]]:
    """The prompts of a completion: text with the special tokens that the tokenizer adds, or ids as they are.

    Raises:
        Problem: 400, a prompt cannot be used.
    """
    prompt: Any = body.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not prompt:
        raise Problem(400, "'prompt' is an empty list.", param="prompt")
    try:
        return [
            tuple(tokenizer.encode(each, add_special_tokens=True) if isinstance(each, str) else each) for each in prompt
        ]
    except DataError as error:
        raise Problem(400, _sentence(error), param="prompt") from None


def _plain(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message as templates read it: text parts joined by line breaks, arguments of tool calls as objects."""
    out = dict(message)
    content = out.get("content")
    if not isinstance(out.get("role"), str):
        raise Problem(400, f"'{where}.role' is missing or no text.", param="messages")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
            raise Problem(400, f"'{where}.content' has parts that are not text.", param="messages")
        out["content"] = "\n".join(texts)  # type: ignore[arg-type]
    elif content is not None and not isinstance(content, str):
        raise Problem(400, f"'{where}.content' is no text.", param="messages")
    calls = out.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise Problem(400, f"'{where}.tool_calls' is no list of objects.", param="messages")
        out["tool_calls"] = [_call(call) for call in calls]
    return out


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _sentence(error: DataError) -> str:
    return error.what + (f" ({error.expected})" if error.expected else "")
