"""What a server is told at its start."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halfbyte.errors import ConfigError

__all__ = ["OnRefit", "ServeSettings"]

OnRefit = Literal["finish", "swap"]


@dataclass(frozen=True)
class ServeSettings:
    """Model, budgets and limits.

    Arguments:
        model: model folder, or ``tiny``.
        precision: preset.
        served_name: the name clients ask for; by default the model as given.
        host, port: where to listen; port 0 takes any that is free.
        api_key: bearer token that every path but ``/health`` demands; None demands none.
        kv_memory_mb: memory of the KV page pool, MiB.
        max_sequences: samples in one forward pass.
        max_batch_tokens: token rows in one forward pass.
        max_length: longest sequence; None takes what the model has positions for.
        prefix_cache: reuse the KV of equal prompt beginnings.
        chat_template: file that takes the place of the model's own template.
        max_queue: samples that may wait beyond ``max_sequences``; more are refused with 429.
        max_prompt: tokens of a prompt; None leaves it to ``max_length``.
        max_n: choices of one request, all its prompts together.
        max_body_bytes: of a request.
        stream_seconds: shortest time between two chunks of a stream; its first and last token never wait.
        request_seconds: longest time for one request.
        drain_seconds: longest time for running requests after SIGTERM.
        follow: refit store that the weights follow.
        on_refit: requests in flight ``finish`` on their version while new ones wait, or are ``swap``-ped at a token.
        follow_seconds: between looks at the store.
        follow_key: file with the key that manifests must be signed with.
        reader: this server's name among the store's readers.

    Raises:
        ConfigError: a value out of range.
    """

    model: str
    precision: str = "w4a4kv4"
    served_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    kv_memory_mb: float = 256.0
    max_sequences: int = 256
    max_batch_tokens: int = 2048
    max_length: int | None = None
    prefix_cache: bool = True
    chat_template: Path | None = None
    max_queue: int = 1024
    max_prompt: int | None = None
    max_n: int = 128
    max_body_bytes: int = 4 * 2**20
    stream_seconds: float = 0.02
    request_seconds: float = 600.0
    drain_seconds: float = 60.0
    follow: str | None = None
    on_refit: OnRefit = "finish"
    follow_seconds: float = 1.0
    follow_key: Path | None = None
    reader: str = "serve"

    def __post_init__(self) -> None:
        checks = (
            ("port", 0 <= self.port < 65536, "0 to 65535"),
            ("api-key", self.api_key is None or (self.api_key.isascii() and self.api_key.strip() != ""), "ASCII text"),
            ("served-name", self.served_name is None or self.served_name != "", "a name"),
            ("kv-memory-mb", 0 < self.kv_memory_mb < math.inf, "a positive number"),
            ("max-queue", self.max_queue >= 0, "0 or more"),
            ("max-prompt", self.max_prompt is None or self.max_prompt >= 1, "at least 1"),
            ("max-n", self.max_n >= 1, "at least 1"),
            ("max-body-bytes", self.max_body_bytes >= 1, "at least 1"),
            ("stream-seconds", self.stream_seconds >= 0, "0 or more"),
            ("request-seconds", self.request_seconds > 0, "a positive number"),
            ("drain-seconds", self.drain_seconds >= 0, "0 or more"),
            ("follow-seconds", self.follow_seconds > 0, "a positive number"),
        )
        for name, good, expected in checks:
            if not good:
                value = getattr(self, name.replace("-", "_")) if name != "api-key" else "(not shown)"
                raise ConfigError(f"{name} is {value!r}", where=f"--{name}", expected=expected)

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_name or self.model
