"""A trial folder against scripted servers, and its commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_server import FakeServer, Script

from halfbyte.cli.main import main

PLAIN: dict[str, dict[str, Any]] = {
    "trial": {"name": "case"},
    "sampling": {"max_tokens": 16},
    "run": {"concurrency": 4, "timeout": 60.0, "warmup": 1},
    "limits": {
        "margin": 0.1, "failure_rate": 0.1, "benefit": "cost_per_passed", "benefit_min": 0.2,
    },
    "cost": {"machine_per_hour": 1.0, "requests_per_month": 1e6},
}  # fmt: skip


def said(number: int) -> str:
    """What the user says in a task."""
    return f"question number {number} about the colour of the {number}th house in the street"


def make_tasks(n: int, **changed: Any) -> list[dict[str, Any]]:
    """Tasks with exact answers."""
    plain = {"scorer": {"type": "exact"}}
    return [{"id": f"t{i:03d}", "prompt": said(i), "expected": f"answer {i}", **plain, **changed} for i in range(n)]


def answers(n: int) -> dict[str, str]:
    """What a server must know to pass them all."""
    return {said(i): f"answer {i}" for i in range(n)}


def toml(sections: dict[str, dict[str, Any]]) -> str:
    """TOML of plain values; JSON has the same notation for them."""
    lines = []
    for name, section in sections.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    return "\n".join(lines) + "\n"


def write_trial(
    folder: Path,
    baseline: dict[str, Any],
    candidate: dict[str, Any],
    tasks: list[dict[str, Any]],
    **changed: dict[str, Any],
) -> Path:
    """trial.toml and tasks.jsonl; ``changed`` overrides keys of sections."""
    folder.mkdir(exist_ok=True)
    sections = {name: {**section, **changed.pop(name, {})} for name, section in PLAIN.items()}
    (folder / "trial.toml").write_text(
        toml({**sections, **changed, "baseline": baseline, "candidate": candidate}), encoding="utf-8"
    )
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    return folder


@contextmanager
def two_servers(
    n: int, baseline: dict[str, Any] | None = None, candidate: dict[str, Any] | None = None,
    on_request: Callable[[int], None] | None = None,
) -> Iterator[tuple[FakeServer, FakeServer]]:  # fmt: skip
    """Both arms, which know all answers, with changes to their scripts."""
    scripts = [
        Script(**{"name": name, "answers": answers(n), **(changed or {})})
        for name, changed in (("full", baseline), ("four-bit", candidate))
    ]
    with FakeServer(scripts[0], on_request=on_request) as first, FakeServer(scripts[1]) as second:
        yield first, second


@contextmanager
def url_trial(
    folder: Path, n: int, baseline: dict[str, Any] | None = None, candidate: dict[str, Any] | None = None,
    tasks: list[dict[str, Any]] | None = None, **changed: dict[str, Any],
) -> Iterator[tuple[Path, FakeServer, FakeServer]]:  # fmt: skip
    """A folder whose targets are two servers that run."""
    with two_servers(n, baseline, candidate) as (first, second):
        write_trial(folder, {"url": first.url}, {"url": second.url}, tasks or make_tasks(n), **changed)
        yield folder, first, second


def trial(command: str, folder: Path, *arguments: str) -> int:
    """The exit code of a command."""
    return main(["trial", command, str(folder), *arguments])


def steps(folder: Path, *commands: str) -> list[int]:
    """Exit codes of commands, one after the other."""
    return [trial(command, folder) for command in commands]


def lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def outcome(folder: Path) -> dict[str, Any]:
    """outcome.json."""
    data: dict[str, Any] = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    return data
