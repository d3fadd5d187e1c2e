"""``halfbyte serve``: an OpenAI-compatible server on the rollout engine."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from halfbyte.cli import threads as thread_policy
from halfbyte.cli.parameter import flag

__all__ = ["serve"]


def serve(
    model: Annotated[str, Parameter(help="Model folder, also one that halfbyte quantize wrote, or tiny.")],
    /,
    *,
    precision: Annotated[str, Parameter(help="Precision preset.")] = "w4a4kv4",
    host: Annotated[str, Parameter(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port; 0 takes one that is free.")] = 8000,
    served_name: Annotated[
        str | None, Parameter(help="Name that clients ask for; by default the model as given.")
    ] = None,
    api_key: Annotated[
        str | None, Parameter(help="Bearer token to demand; by default that of HALFBYTE_API_KEY, if it is set.")
    ] = None,
    kv_memory_mb: Annotated[float, Parameter(help="Memory of the KV pages, MiB.")] = 256.0,
    max_sequences: Annotated[int, Parameter(help="Samples in one forward pass.")] = 256,
    max_batch_tokens: Annotated[int, Parameter(help="Token rows in one forward pass.")] = 2048,
    max_length: Annotated[
        int | None, Parameter(help="Longest prompt with its response; by default the model's positions.")
    ] = None,
    max_prompt: Annotated[int | None, Parameter(help="Longest prompt, in tokens.")] = None,
    max_queue: Annotated[int, Parameter(help="Samples that may wait; more are refused with 429.")] = 1024,
    max_n: Annotated[int, Parameter(help="Choices of one request.")] = 128,
    max_body_mb: Annotated[float, Parameter(help="Longest body of a request, MiB.")] = 4.0,
    stream_seconds: Annotated[
        float, Parameter(help="Shortest time between two chunks of a stream; 0 sends every token by itself.")
    ] = 0.02,
    request_seconds: Annotated[float, Parameter(help="Longest time for a request.")] = 600.0,
    drain_seconds: Annotated[float, Parameter(help="Longest time for running requests after SIGTERM.")] = 60.0,
    prefix_cache: Annotated[bool, Parameter(help="Reuse the KV of equal prompt beginnings.")] = True,
    chat_template: Annotated[Path | None, Parameter(help="File to take instead of the model's template.")] = None,
    follow: Annotated[str | None, Parameter(help="Refit store whose versions are served as they come.")] = None,
    on_refit: Annotated[
        Literal["finish", "swap"],
        Parameter(help="Running requests finish on their version while others wait, or change at a token."),
    ] = "finish",
    follow_seconds: Annotated[float, Parameter(help="Seconds between looks at the store.")] = 1.0,
    follow_key: Annotated[Path | None, Parameter(help="File with the key that manifests must be signed with.")] = None,
    reader: Annotated[str, Parameter(help="This server's name, unique among the readers of a store.")] = "serve",
    verbose: Annotated[bool, flag("Also log refits.")] = False,
    threads: Annotated[int | None, Parameter(help="Threads; all usable cores by default.")] = None,
) -> int:
    """Serve a model to OpenAI clients. SIGTERM or Ctrl-C finishes running requests; a second one stops at once."""
    thread_policy.apply(threads)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s: %(message)s")

    from halfbyte.serve.server import serve as run
    from halfbyte.serve.settings import ServeSettings

    settings = ServeSettings(
        model=model,
        precision=precision,
        served_name=served_name,
        host=host,
        port=port,
        api_key=api_key if api_key is not None else os.environ.get("HALFBYTE_API_KEY") or None,
        kv_memory_mb=kv_memory_mb,
        max_sequences=max_sequences,
        max_batch_tokens=max_batch_tokens,
        max_length=max_length,
        prefix_cache=prefix_cache,
        chat_template=chat_template,
        max_queue=max_queue,
        max_prompt=max_prompt,
        max_n=max_n,
        max_body_bytes=int(max_body_mb * 2**20) if math.isfinite(max_body_mb) else 0,
        stream_seconds=stream_seconds,
        request_seconds=request_seconds,
        drain_seconds=drain_seconds,
        follow=follow,
        on_refit=on_refit,
        follow_seconds=follow_seconds,
        follow_key=follow_key,
        reader=reader,
    )
    run(settings)
    return 0
