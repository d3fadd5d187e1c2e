"""A study file: which arms, axes and seeds, on which task and budget; and the runs that follow from it."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from halfbyte.config import Config, Section, close_names, validated
from halfbyte.config.settings import read_file
from halfbyte.errors import ConfigError
from halfbyte.study.arms import BUILT_IN, Arm, configured, require_arm_keys

__all__ = ["Job", "Plan", "load_plan"]

Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
#: The study sets these itself.
OWN = ("train.seed", "train.out", "train.threads", "train.tracker", "train.delta_precision")
#: Updates of every arm are counted in these FP4 coordinates, also where nothing ran in FP4.
COORDINATES = "w4a4kv4"


class StudySection(Section):
    """``[study]``.

    Arguments:
        name: of the study; one word of letters, digits, ``-`` and ``_``.
        out: study folder.
        arms: in the order of the tables; all built-in arms and those of the file by default.
        seeds: one run of every arm and axis value for each.
        processes, threads: worker processes at a time, and threads of each. Threads are part of a run's configuration.
        reference: the arm that others are compared with, seed by seed.
        deployed: precisions in which every trained policy is evaluated at the end, beside the one it was trained in.
        keep_checkpoints: keep checkpoints and refit store of finished runs.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")] = "study"
    out: Text | None = None
    arms: tuple[Text, ...] | None = None
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(min_length=1)] = (0, 1, 2, 3, 4)
    processes: Count = 1
    threads: Count = 1
    reference: Text = "bf16"
    deployed: tuple[Text, ...] = ("bf16", "w4a4kv4")
    keep_checkpoints: bool = False


@dataclass(frozen=True)
class Job:
    """One run: an arm, a point of the axes, a seed, and where it goes."""

    arm: str
    point: Mapping[str, Any]
    seed: int
    folder: Path
    config: Config

    @property
    def label(self) -> str:
        """For progress lines."""
        return " ".join(
            [self.arm, *(f"{key}={_text(value)}" for key, value in self.point.items()), f"seed {self.seed}"]
        )


@dataclass(frozen=True)
class Plan:
    """A study, checked: every configuration in it is valid."""

    section: StudySection
    arms: tuple[Arm, ...]
    axes: Mapping[str, tuple[Any, ...]]
    base: Mapping[str, Any]
    folder: Path

    def points(self) -> list[dict[str, Any]]:
        """Every combination of axis values; one empty point without axes."""
        return [dict(zip(self.axes, values)) for values in itertools.product(*self.axes.values())]

    def jobs(self) -> list[Job]:
        """All runs, seed by seed: whoever looks early sees the same seeds of every arm."""
        trained = [arm for arm in self.arms if arm.source is None]
        return [
            self._job(arm, point, seed) for seed in self.section.seeds for point in self.points() for arm in trained
        ]

    def to_json(self) -> dict[str, Any]:
        """What decides numbers and analysis: kept with the results. Worker processes and folders are left out."""
        section = self.section.model_dump(mode="json", exclude={"out", "processes", "keep_checkpoints"})
        return {
            "study": {**section, "arms": [arm.name for arm in self.arms]},
            "arms": {
                arm.name: {"sets": dict(arm.sets), "about": arm.about, "source": arm.source, "evaluated": arm.evaluated}
                for arm in self.arms
            },
            "axes": {key: list(values) for key, values in self.axes.items()},
            "base": dict(self.base),
        }

    def digest(self) -> str:
        """Of :meth:`to_json`."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def _job(self, arm: Arm, point: Mapping[str, Any], seed: int) -> Job:
        name = "--".join([_slug(arm.name), *(_slug(f"{key}={_text(value)}") for key, value in point.items())])
        folder = self.folder / "runs" / name / f"seed_{seed}"
        own = {
            "train.seed": seed,
            "train.out": str(folder),
            "train.threads": self.section.threads,
            "train.delta_precision": COORDINATES,
        }
        where = f"arm {arm.name}" + "".join(f", {key} = {_text(value)}" for key, value in point.items())
        # An arm's own keys win over an axis: an axis varies what the arms share.
        return Job(arm.name, point, seed, folder, configured(self.base, {**point, **arm.sets, **own}, where))


def load_plan(path: Path, out: Path | None = None, processes: int | None = None) -> Plan:
    """Read a study file.

    Arguments:
        out, processes: in place of the file's.

    Raises:
        ConfigError: the file cannot be read, or a key, arm, axis or value is wrong; with what was expected.
    """
    data = read_file(path)
    where = str(path)
    unknown = [key for key in data if key not in ("study", "base", "axes", "arms")]
    if unknown:
        raise ConfigError(
            f"unknown tables: {', '.join(unknown)}", where=where, expected="[study], [base], [axes], [arms.NAME]"
        )
    for key, value in data.items():
        if not isinstance(value, dict):
            raise ConfigError(f"{key} is not a table", where=where, expected=f"[{key}]")
    given = dict(data.get("study", {}))
    given |= {
        key: value for key, value in (("out", str(out) if out else None), ("processes", processes)) if value is not None
    }
    for key in ("arms", "seeds", "deployed"):
        if isinstance(given.get(key), list):
            given[key] = tuple(given[key])
    section = validated(StudySection, given, f"{where}: study")
    known = {**BUILT_IN, **_own_arms(data.get("arms", {}), where)}
    plan = Plan(
        section,
        _chosen(section, known, where),
        _axes(data.get("axes", {}), where),
        data.get("base", {}),
        Path(section.out or f"runs/{section.name}"),
    )
    _check(plan, where)
    return plan


def _own_arms(tables: Mapping[str, Any], where: str) -> dict[str, Arm]:
    arms: dict[str, Arm] = {}
    for name, table in tables.items():
        place = f"{where}: arms.{name}"
        if not isinstance(table, dict):
            raise ConfigError(f"arms.{name} is not a table", where=where, expected="configuration keys in [arms.NAME]")
        if name in BUILT_IN:
            raise ConfigError(f"{name} is a built-in arm", where=place, fix="give yours a name of its own")
        settings = dict(table)
        start, about = settings.pop("extends", []), settings.pop("about", "")
        sets: dict[str, Any] = {}
        for other in [start] if isinstance(start, str) else start:
            found = {**BUILT_IN, **arms}.get(other)
            if found is None or found.source:
                raise ConfigError(
                    f"unknown arm {other!r}", where=f"{place}.extends", expected=_names({**BUILT_IN, **arms})
                )
            sets |= found.sets
        mine = dict(_flat(settings))
        require_arm_keys(mine, place)
        arms[name] = Arm(name, sets | mine, str(about))
    return arms


def _chosen(section: StudySection, known: Mapping[str, Arm], where: str) -> tuple[Arm, ...]:
    names = tuple(known) if section.arms is None else section.arms
    for name in names:
        if name not in known:
            close = close_names(name, known)
            raise ConfigError(
                f"unknown arm {name!r}",
                where=f"{where}: study.arms",
                expected=_names(known),
                fix=f"did you mean {' or '.join(close)}?" if close else "define it in [arms.NAME]",
            )
    for label, values in (("arms", names), ("seeds", section.seeds), ("deployed", section.deployed)):
        if len(set(values)) != len(values):
            raise ConfigError(f"{label} names one of them twice", where=f"{where}: study.{label}")
    arms = tuple(known[name] for name in names)
    for arm in arms:
        if arm.source and arm.source not in names:
            raise ConfigError(
                f"{arm.name} takes its policies from {arm.source}",
                where=f"{where}: study.arms",
                fix=f"add {arm.source}",
            )
        if arm.evaluated and arm.evaluated not in section.deployed:
            raise ConfigError(
                f"{arm.name} is evaluated in {arm.evaluated}",
                where=f"{where}: study.deployed",
                fix=f"add {arm.evaluated}",
            )
    return arms


def _axes(table: Mapping[str, Any], where: str) -> dict[str, tuple[Any, ...]]:
    axes: dict[str, tuple[Any, ...]] = {}
    for key, values in _flat(table):
        place = f"{where}: axes.{key}"
        if not isinstance(values, list) or not values:
            raise ConfigError("an axis needs its values", where=place, expected=f'"{key}" = [value, value]')
        if key in OWN:
            raise ConfigError(
                f"{key} is set by the study", where=place, fix="use study.seeds, study.out or study.threads"
            )
        if len({_text(value) for value in values}) != len(values):
            raise ConfigError("an axis has one value twice", where=place)
        axes[key] = tuple(values)
    return axes


def _check(plan: Plan, where: str) -> None:
    for key, _ in _flat(plan.base):
        if key in OWN:
            raise ConfigError(
                f"{key} is set by the study", where=f"{where}: base", fix="use study.seeds, study.out, study.threads"
            )
    for arm in plan.arms:
        shared = [key for key in plan.axes if any(_within(key, own) or _within(own, key) for own in arm.sets)]
        if shared and not arm.source:
            raise ConfigError(
                f"{shared[0]} is an axis, and arm {arm.name} sets it",
                where=f"{where}: axes",
                fix="leave that arm out, or make each value an arm of its own",
            )
    jobs = plan.jobs()
    folders = {job.folder for job in jobs}
    if len(folders) != len(jobs):
        raise ConfigError(
            "two runs would share a folder", where=where, fix="give arms and axis values names that differ"
        )


def _within(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.")


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys: of nested tables down to the sections, and of keys that are dotted already.

    ``precision`` and option tables are values: they are set as a whole.
    """
    for key, value in table.items():
        name = f"{prefix}{key}"
        whole = name == "precision" or name.endswith((".precision", "_options", ".options"))
        if isinstance(value, dict) and not whole:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _slug(text: str) -> str:
    """A name of a folder on any file system; texts that need changes get a digest of the original."""
    plain = re.sub(r"[^A-Za-z0-9._+=-]", "-", text)[:80]
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _names(arms: Mapping[str, Arm]) -> str:
    return ", ".join(name for name, arm in arms.items() if arm.source is None)
