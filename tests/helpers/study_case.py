"""Made-up runs for the study's tests: records, run folders, and a pool that pretends to train."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from halfbyte.config import Config
from halfbyte.study.pool import Command
from halfbyte.study.records import RunRecord


class KilledError(BaseException):
    """The machine died here."""


def record(arm: str, seed: int, final: float, **changes: Any) -> RunRecord:
    """A finished run whose accuracy rises in a straight line from 0.4 over 10 steps."""
    values: dict[str, Any] = {
        "arm": arm,
        "seed": seed,
        "group": "g",
        "setting": {"train.steps": 10},
        "steps": 10,
        "planned": 10,
        "status": "finished",
        "accuracy": ((0, 0.4), (10, final)),
        "deployed": {"bf16": final, "w4a4kv4": final - 0.1},
        "metrics": {"gap/k3_kl": 1e-4, "align/bytes_per_token": 100.0},
        "series": {"gap/k3_kl": ((1.0, 1e-4), (2.0, 2e-4))},
        "seconds": {"time/rollout": 5.0, "time/learner": 7.0},
        "tokens": 2000.0,
    }
    return RunRecord(**{**values, **changes})


def accuracy_of(config: Config, step: int) -> float:
    """A made-up accuracy that depends on arm, seed and step only."""
    data = config.to_json()
    data["train"].pop("out")
    return (zlib.crc32(json.dumps([data, step], sort_keys=True).encode()) % 1000) / 1000


def write_run(folder: Path, config: Config, *, steps: int | None = None, finish: bool = True) -> None:
    """A run folder as training leaves it, after ``steps`` steps."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    done = config.train.steps if steps is None else steps
    rows: list[Mapping[str, Any]] = [{"step": 0, "kind": "eval", "eval/accuracy": accuracy_of(config, 0)}]
    for step in range(1, done + 1):
        rows.append(
            {
                "step": step,
                "kind": "train",
                "gap/k3_kl": 1e-3 * step,
                "time/rollout": 1.0,
                "time/learner": 2.0,
                "tokens/rollout": 100.0,
            }
        )
    if finish:
        rows.append({"step": done, "kind": "eval", "eval/accuracy": accuracy_of(config, done)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finish:
        (folder / "summary.json").write_text('{"steps": 1}')


class PretendPool:
    """Runs commands in order, in this process. ``die_at``: the event (counted from 0) at which the machine dies."""

    def __init__(self, die_at: int | None = None, fail: Sequence[str] = ()) -> None:
        self.die_at, self.fail, self.events, self.trained = die_at, fail, 0, []

    def __call__(
        self,
        commands: Iterable[Command],
        *,
        processes: int,
        environ: Mapping[str, str],
        ended: Callable[[str, int], None],
        tick: Callable[[Sequence[str]], None],
    ) -> bool:
        for command in commands:
            folder = Path(command.arguments[-1])
            self._event()
            task = json.loads((folder / "task.json").read_text())
            config = Config.from_json(task["config"])
            if any(word in str(folder) for word in self.fail):
                command.log.write_text("error: no luck\n")
                ended(command.name, 2)
                continue
            if not (folder / "summary.json").exists():
                write_run(folder, config, steps=1, finish=False)
                self._event()
                self.trained.append(folder.relative_to(folder.parents[1]).as_posix())
                write_run(folder, config)
                self._event()
            served = {name: {"eval/accuracy": accuracy_of(config, 99)} for name in task["deployed"]}
            (folder / "deployed.json").write_text(json.dumps(served))
            self._event()
            tick([command.name])
            ended(command.name, 0)
            self._event()
        return True

    def _event(self) -> None:
        if self.events == self.die_at:
            raise KilledError
        self.events += 1
