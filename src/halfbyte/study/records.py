"""What a run folder says, in compact form: enough for every table and picture, small enough to commit.

Read tolerantly: a run may be going on, may have been killed, may come from elsewhere. Of two rows for one step the later one
counts; a broken line is skipped; values that are not finite numbers are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from halfbyte.errors import ConfigError, DataError
from halfbyte.files import read_object
from halfbyte.study.arms import BUILT_IN, Arm, recognise, setting

__all__ = [
    "COLLAPSE_SHARE",
    "METRICS",
    "SECONDS",
    "SERIES",
    "RunRecord",
    "collect_records",
    "derived",
    "packed",
    "read_run",
]

#: Metrics averaged over the steps of a run.
METRICS = (
    "gap/mean_abs",
    "gap/k3_kl",
    "gap/max_abs",
    "parity/max_gap",
    "entropy/mean",
    "optim/grad_norm",
    "weight/mean",
    "align/code_mismatch",
    "align/bytes_per_token",
    "refit/bytes",
    "refit/full_bytes",
    "refit/changed",
    "refit/changed_codes",
    "refit/changed_scales",
    "refit/avalanches",
    "length/mean",
    "stale/mean",
)
#: Metrics summed over the steps of a run.
SECONDS = ("time/rollout", "time/learner", "time/publish")
#: Metrics kept over training, as means of equal stretches.
SERIES = (
    "accuracy/train",
    "gap/k3_kl",
    "entropy/mean",
    "optim/grad_norm",
    "refit/changed",
    "refit/changed_codes",
    "refit/changed_scales",
    "refit/avalanches",
)
BINS = 25
#: A run has collapsed when its last accuracy is below this share of its best earlier one.
COLLAPSE_SHARE = 0.5
FORMAT = "halfbyte-study-1"
_DIGITS = 7


@dataclass(frozen=True)
class RunRecord:
    """A run, reduced.

    Arguments:
        arm, seed: whose.
        group: study and axis values, or, of runs made elsewhere, a text that :func:`collect_records` finds.
        setting: digest-free dotted keys that runs of one group share.
        steps, planned: steps done and asked for.
        status: ``finished``, ``unfinished``, ``broken`` (a number was not finite; see ``note``).
        accuracy: (step, accuracy) of every evaluation, in the run's own rollout precision.
        deployed: precision -> accuracy of the trained policy.
        metrics, series, seconds, tokens: see the tuples of this module; ``tokens`` are those of the rollouts.
        note: what went wrong.
        source: folder, as named by the user.
    """

    arm: str
    seed: int
    group: str
    setting: Mapping[str, Any]
    steps: int
    planned: int
    status: str
    accuracy: tuple[tuple[int, float], ...] = ()
    deployed: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    series: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    tokens: float = 0.0
    note: str = ""
    source: str = ""

    @property
    def finished(self) -> bool:
        """Whether nothing more will come: it counts in tables."""
        return self.status in ("finished", "broken")

    @property
    def final(self) -> float | None:
        """Accuracy after the last step; 0 for a run that broke: there is no policy to serve."""
        if self.status == "broken":
            return 0.0
        return self.accuracy[-1][1] if self.accuracy else None

    @property
    def area(self) -> float | None:
        """Mean accuracy over training: trapezia between evaluations; from where a run broke on, 0."""
        points = list(self.accuracy)
        if self.status == "broken":
            points += [(self.steps, 0.0), (self.planned, 0.0)]
        if len(points) < 2 or points[-1][0] <= points[0][0]:
            return None
        total = math.fsum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))
        return total / (points[-1][0] - points[0][0])

    @property
    def collapsed(self) -> bool | None:
        """Broken, or the last accuracy below half of the best before it; None where that cannot be told."""
        if self.status == "broken":
            return True
        if len(self.accuracy) < 2:
            return None
        return self.accuracy[-1][1] < COLLAPSE_SHARE * max(value for _, value in self.accuracy[:-1])

    def to_json(self) -> dict[str, Any]:
        """A JSON object; :meth:`from_json` restores an equal record."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunRecord:
        """The record that :meth:`to_json` described.

        Raises:
            TypeError, ValueError, KeyError: it is none.
        """
        values = {f.name: data[f.name] for f in fields(cls)}
        values["accuracy"] = tuple((int(step), float(value)) for step, value in data["accuracy"])
        values["series"] = {
            key: tuple((float(x), float(y)) for x, y in points) for key, points in data["series"].items()
        }
        return cls(**values)


def packed(records: Sequence[RunRecord]) -> dict[str, Any]:
    """``runs`` and the ``settings`` that they point to: runs of a study share one."""
    settings: list[Mapping[str, Any]] = []
    runs = []
    for record in records:
        if record.setting not in settings:
            settings.append(record.setting)
        runs.append({**record.to_json(), "setting": settings.index(record.setting)})
    return {"settings": settings, "runs": runs}


def collect_records(paths: Iterable[Path]) -> list[RunRecord]:
    """Records of run folders, of study folders (all their runs) and of ``study.json`` files.

    Runs made elsewhere are put into groups by what their configurations share beside the arm.

    Raises:
        DataError: a path is none of these, or holds a run that was named before.
    """
    found: list[RunRecord] = []
    for path in paths:
        found += _records_at(path)
    found = _grouped(found)
    seen: dict[tuple[str, str, int], str] = {}
    for record in found:
        key = (record.group, record.arm, record.seed)
        if key in seen:
            raise DataError(
                f"two runs of arm {record.arm} with seed {record.seed} in one setting",
                where=f"{seen[key]} and {record.source}",
                expected="one run for every arm and seed",
                fix="leave one out",
            )
        seen[key] = record.source
    return found


def read_run(folder: Path) -> RunRecord:
    """The record of a run folder; its arm comes from ``label.json`` of a study, or from its configuration.

    Raises:
        DataError: the folder is not a run.
    """
    config, metrics = read_object(folder / "config.json"), folder / "metrics.jsonl"
    if config is None or not metrics.is_file():
        raise DataError(
            "this is no run",
            where=str(folder),
            expected="a folder that halfbyte train or halfbyte study wrote, with config.json and metrics.jsonl",
        )
    label = read_object(folder / "label.json")
    try:
        if label is not None:
            arm, group, seed = str(label["arm"]), str(label["group"]), int(label["seed"])
        else:
            arm, group, seed = recognise(config), "", int(config["train"]["seed"])
        planned = int(config["train"]["steps"])
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise DataError(f"a configuration that cannot be used: {error}", where=str(folder)) from error
    rows = _rows(metrics)
    outcome = read_object(folder / "outcome.json")
    done = (folder / "summary.json").is_file() and (label is None or (folder / "deployed.json").is_file())
    deployed = read_object(folder / "deployed.json") or {}
    train = rows["train"]
    return RunRecord(
        arm=arm,
        seed=seed,
        group=group,
        setting=setting(config),
        steps=max((*train, 0)),
        planned=planned,
        status="broken" if outcome else "finished" if done else "unfinished",
        accuracy=tuple(
            (step, row["eval/accuracy"]) for step, row in sorted(rows["eval"].items()) if "eval/accuracy" in row
        ),
        deployed={name: float(row["eval/accuracy"]) for name, row in deployed.items()},
        metrics={key: _rounded(_mean(values)) for key in METRICS if (values := _column(train, key))},
        series={key: points for key in SERIES if (points := _binned(train, key, planned))},
        seconds={key: _rounded(math.fsum(values)) for key in SECONDS if (values := _column(train, key))},
        tokens=math.fsum(_column(train, "tokens/rollout")),
        note=str(outcome.get("message", "")) if outcome else "",
        source=str(folder),
    )


def derived(records: Sequence[RunRecord], arms: Iterable[Arm] = tuple(BUILT_IN.values())) -> list[RunRecord]:
    """Records of arms that are not trained: the policies of another arm, evaluated in another precision."""
    out = []
    for arm in arms:
        for record in records:
            if arm.source == record.arm and arm.evaluated is not None and arm.evaluated in record.deployed:
                value = record.deployed[arm.evaluated]
                out.append(
                    replace(record, arm=arm.name, accuracy=((record.steps, value),), deployed={arm.evaluated: value})
                )
    return out


def _records_at(path: Path) -> list[RunRecord]:
    if path.is_file():
        data = read_object(path)
        if data is None or data.get("format") != FORMAT:
            raise DataError("not the results of a study", where=str(path), expected="a study.json of this version")
        try:
            return [RunRecord.from_json({**run, "setting": data["settings"][run["setting"]]}) for run in data["runs"]]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"damaged results: {error!r}", where=str(path)) from error
    if (path / "plan.json").is_file():
        folders = sorted(p.parent for p in (path / "runs").glob("*/seed_*/metrics.jsonl"))
        return [read_run(folder) for folder in folders]
    return [read_run(path)]


def _grouped(records: list[RunRecord]) -> list[RunRecord]:
    """Runs without a group join that of a study with the same setting; the others get one that names the keys in which their
    settings differ from each other."""
    studied = {json.dumps(r.setting, sort_keys=True): r.group for r in reversed(records) if r.group}
    records = [
        r if r.group else replace(r, group=studied.get(json.dumps(r.setting, sort_keys=True), "")) for r in records
    ]
    loose = [record for record in records if not record.group]
    texts = [{key: json.dumps(value) for key, value in record.setting.items()} for record in loose]
    keys = sorted({key for text in texts for key in text})
    differing = [key for key in keys if len({text.get(key) for text in texts}) > 1]
    named = {
        id(record): "runs" + "".join(f", {key} = {text.get(key, 'absent')}" for key in differing)
        for record, text in zip(loose, texts)
    }
    return [replace(record, group=named[id(record)]) if id(record) in named else record for record in records]


def _rows(path: Path) -> dict[str, dict[int, dict[str, float]]]:
    rows: dict[str, dict[int, dict[str, float]]] = {"train": {}, "eval": {}}
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            value = json.loads(line)
            step, kind = value["step"], value["kind"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if type(step) is int and kind in rows:
            rows[kind][step] = {
                key: float(item)
                for key, item in value.items()
                if isinstance(item, (int, float)) and not isinstance(item, bool) and math.isfinite(item)
            }
    return rows


def _column(rows: Mapping[int, Mapping[str, float]], key: str) -> list[float]:
    return [row[key] for _, row in sorted(rows.items()) if key in row]


def _binned(rows: Mapping[int, Mapping[str, float]], key: str, planned: int) -> tuple[tuple[float, float], ...]:
    """Means over equal stretches of the planned steps, at their middles: the same stretches in every run."""
    size = max(1, -(-planned // BINS))
    bins: dict[int, list[float]] = {}
    for step, row in sorted(rows.items()):
        if key in row:
            bins.setdefault((step - 1) // size, []).append(row[key])
    return tuple((index * size + (size + 1) / 2, _rounded(_mean(values))) for index, values in bins.items())


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
