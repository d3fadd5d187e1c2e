"""Answers as OpenAI's clients read them: whole, and in chunks. Our own fields are ``weight_version`` (of the last token) and,
in a choice, ``weight_versions`` (of every token, run-length coded) and ``token_ids``."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from halfbyte import __version__
from halfbyte.serve.choice import Delta, version_runs
from halfbyte.serve.logprobs import TokenTexts, chat_entry, completion_logprobs

__all__ = ["Answer", "Endpoint", "encode", "usage"]

Endpoint = Literal["chat", "completions"]


@dataclass(frozen=True)
class Answer:
    """What all parts of one answer share.

    Arguments:
        endpoint: whose shapes.
        model: the served name.
        precision: its name, for the fingerprint.
        texts: of tokens, for log-probs.
        logprobs: whether they are shown.
        token_ids: whether they are shown.
    """

    endpoint: Endpoint
    model: str
    precision: str
    texts: TokenTexts
    logprobs: bool
    token_ids: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any], version: int) -> dict[str, Any]:
        """The one object of an answer that is not streamed."""
        return {**self._frame(version, chunk=False), "choices": choices, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], version: int, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """One object of a stream."""
        return {**self._frame(version, chunk=True), "choices": choices, **(extra or {})}

    def choice(self, index: int, delta: Delta, *, prefix: str = "", prompt: list[int] | None = None) -> dict[str, Any]:
        """A whole choice."""
        text = prefix + delta.text
        shown = {"message": {"role": "assistant", "content": text}} if self.endpoint == "chat" else {"text": text}
        return {"index": index, **shown, **self._rest(delta, prompt)}

    def part(self, index: int, delta: Delta, *, prefix: str = "", prompt: list[int] | None = None) -> dict[str, Any]:
        """A choice's part in a chunk."""
        text = prefix + delta.text
        shown = {"delta": {"content": text} if text else {}} if self.endpoint == "chat" else {"text": text}
        return {"index": index, **shown, **self._rest(delta, prompt)}

    def opening(self, index: int) -> dict[str, Any]:
        """The first part of a chat's choice."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _rest(self, delta: Delta, prompt: list[int] | None) -> dict[str, Any]:
        out: dict[str, Any] = {"logprobs": self._logprobs(delta) if self.logprobs else None}
        out |= {"finish_reason": delta.finish, "weight_versions": version_runs(delta.versions)}
        if self.token_ids:
            out["token_ids"] = delta.tokens
            if prompt is not None:
                out["prompt_token_ids"] = prompt
        return out

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        others = delta.alternatives or [()] * len(delta.tokens)
        if self.endpoint == "completions":
            return completion_logprobs(self.texts, delta.tokens, delta.logprobs, delta.alternatives, delta.offsets)
        rows = zip(delta.tokens, delta.logprobs, others)
        return {"content": [chat_entry(self.texts, *row) for row in rows], "refusal": None}

    def _frame(self, version: int, *, chunk: bool) -> dict[str, Any]:
        chat = self.endpoint == "chat"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.id}",
            "object": ("chat.completion.chunk" if chunk else "chat.completion") if chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"halfbyte-{__version__}-{self.precision}-v{version}",
            "weight_version": version,
        }


def usage(prompt: int, generated: int, cached: int) -> dict[str, Any]:
    """The usage object; ``completion_tokens`` counts every token drawn, the one that ended a response as well."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def encode(value: object) -> bytes:
    """JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
