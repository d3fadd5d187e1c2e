"""Request bodies: the same for both arms but for the model's name."""

from __future__ import annotations

from typing import Any

from halfbyte.trial.canonical import digest
from halfbyte.trial.settings import Settings
from halfbyte.trial.tasks import Task

__all__ = ["path_of", "request_body", "request_digest"]


def path_of(settings: Settings) -> str:
    """The endpoint, below the base address."""
    return "/chat/completions" if settings.run.api == "chat" else "/completions"


def request_body(settings: Settings, task: Task, seed: int, model: str) -> dict[str, Any]:
    """The body of a request."""
    sampling = settings.sampling
    body: dict[str, Any] = {
        "model": model,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": task.max_tokens or sampling.max_tokens,
        "seed": seed,
        "stream": settings.run.stream,
        **sampling.extra,
    }
    if settings.run.api == "chat":
        body["messages"] = task.conversation()
        if task.tools is not None:
            body["tools"] = list(task.tools)
    else:
        body["prompt"] = task.prompt
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if settings.run.stream:
        body["stream_options"] = {"include_usage": True}
    return body


def request_digest(body: dict[str, Any]) -> str:
    """SHA-256 of the body without the model's name."""
    return digest({key: value for key, value in body.items() if key != "model"})
