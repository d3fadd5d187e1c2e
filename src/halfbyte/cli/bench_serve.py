"""``halfbyte bench serve``: what the server costs beside the bare engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from halfbyte.cli import threads as thread_policy
from halfbyte.errors import ConfigError

__all__ = ["serve"]


def serve(
    *,
    model: Annotated[str, Parameter(help="Model folder, or tiny for the policy in the package.")] = "tiny",
    precision: Annotated[str, Parameter(help="Precision preset.")] = "w4a4kv4",
    streams: Annotated[int, Parameter(help="Requests at the same time.")] = 32,
    prompt: Annotated[int, Parameter(help="Prompt tokens of each.")] = 16,
    tokens: Annotated[int, Parameter(help="New tokens of each.")] = 64,
    repeats: Annotated[int, Parameter(help="Rounds.")] = 5,
    threads: Annotated[int | None, Parameter(help="Threads; all usable cores by default.")] = None,
    json: Annotated[Path | None, Parameter(help="Also write the rows to this file.")] = None,
) -> int:
    """Tokens a second through the server, streamed and whole, beside the engine without it on the same requests."""
    thread_policy.apply(threads)

    from halfbyte.bench import serve as bench
    from halfbyte.bench import serve_table, table
    from halfbyte.bench.machine import machine

    for value, name in ((streams, "--streams"), (prompt, "--prompt"), (tokens, "--tokens"), (repeats, "--repeats")):
        if value < 1:
            raise ConfigError(f"{name} is {value}", where=name, expected="a positive integer")
    facts, rows = machine(), []
    try:
        for row in bench.race(model, precision, streams=streams, prompt=prompt, tokens=tokens, repeats=repeats):
            print(f"{'streamed' if row.streamed else 'whole'}: {row.ratio:.3f} of the engine", file=sys.stderr)
            rows.append(row)
    finally:
        table.show([table.heading(facts), serve_table.serve_table(rows)])
    if json is not None:
        table.write_json(json, facts, [row.to_json() for row in rows])
    return 0 if all(row.same_tokens for row in rows) else 1
