"""From records to estimates: a pure function, the same for an interim look as for the end.

What is computed is fixed before the first run: final and area-under-curve accuracy of every arm, differences to the reference
paired by seed, 95% intervals, collapse by one rule. Nothing here depends on time, on the order of runs or on earlier looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from halfbyte.statistics import proportions
from halfbyte.study.arms import BUILT_IN, Arm
from halfbyte.study.bootstrap import LEVEL, estimate
from halfbyte.study.records import COLLAPSE_SHARE, FORMAT, METRICS, SECONDS, SERIES, RunRecord, derived, packed

__all__ = ["analyse", "pareto"]

Value = Callable[[RunRecord], float | None]


def analyse(
    records: Iterable[RunRecord],
    *,
    reference: str = "bf16",
    arms: Sequence[Arm] = (),
    planned: int | None = None,
) -> dict[str, Any]:
    """The content of ``study.json`` but for plan and history.

    Arguments:
        records: runs, in any order; unfinished ones are counted and otherwise left out.
        reference: the arm to compare with.
        arms: in the order of the tables; those that only occur in ``records`` follow by name. Arms without training are
            derived from their source's runs.
        planned: runs that the study will have; those given by default.
    """
    runs = sorted(records, key=lambda r: (r.group, r.arm, r.seed))
    finished = [run for run in runs if run.finished]
    known = arms or tuple(BUILT_IN.values())
    everything = finished + derived(finished, known)
    order = {arm.name: i for i, arm in enumerate(known)}
    about = {arm.name: arm.about for arm in (*BUILT_IN.values(), *known)}
    untrained = {arm.name for arm in known if arm.source}
    groups = []
    for group in dict.fromkeys(run.group for run in runs):
        inside = [run for run in everything if run.group == group]
        names = sorted({run.arm for run in inside}, key=lambda name: (order.get(name, len(order)), name))
        base = {run.seed: run for run in inside if run.arm == reference}
        rows = []
        for name in names:
            row = _arm(name, [r for r in inside if r.arm == name], base, reference, trained=name not in untrained)
            rows.append({**row, "about": about.get(name, "")})
        unlike = _unlike(inside)
        groups.append({"name": group, "arms": rows, "pareto": pareto(rows), "differing_settings": unlike})
    total = len(runs) if planned is None else planned
    return {
        "format": FORMAT,
        "reference": reference,
        "finished": len(finished),
        "planned": total,
        "complete": len(finished) >= total,
        "rules": {
            "interval": "95%; bootstrap percentiles over seeds, and Student's t beside them",
            "collapse": f"last accuracy below {COLLAPSE_SHARE} of the best before it, or a number that is not finite",
            "broken": "a run whose numbers stopped being finite counts with accuracy 0 from there on",
        },
        "groups": groups,
        **packed(runs),
    }


def pareto(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Arms that no other arm beats in both mean accuracy and mean rollout seconds (or equals in one and beats in the other)."""
    points = {
        row["arm"]: (row["seconds"]["time/rollout"]["mean"], row["final"]["mean"])
        for row in rows
        if row["trained"] and row["final"] and row["seconds"].get("time/rollout")
    }

    def beaten(cost: float, accuracy: float) -> bool:
        return any(c <= cost and a >= accuracy and (c, a) != (cost, accuracy) for c, a in points.values())

    return [arm for arm, point in points.items() if not beaten(*point)]


def _arm(
    name: str, runs: Sequence[RunRecord], base: Mapping[int, RunRecord], reference: str, *, trained: bool
) -> dict[str, Any]:
    """Everything about one arm in one group."""
    precisions = sorted({key for run in runs for key in run.deployed})
    values: dict[str, Value] = {"final": lambda r: r.final, "area": lambda r: r.area}
    differences = {} if name == reference else {key: _difference(runs, base, value) for key, value in values.items()}
    if name != reference:
        # What is served is compared in one precision: both policies run in it.
        differences |= {f"deployed/{p}": _difference(runs, base, _deployed(p)) for p in precisions}
    judged = [bool(run.collapsed) for run in runs if run.collapsed is not None]
    low, high = proportions.interval(sum(judged), len(judged), (1 - LEVEL) / 2)
    return {
        "arm": name,
        "trained": trained,
        "seeds": [run.seed for run in runs],
        **{key: _estimate(runs, value) for key, value in values.items()},
        "deployed": {p: _estimate(runs, _deployed(p)) for p in precisions},
        "differences": {key: found for key, found in differences.items() if found},
        "collapse": {"runs": len(judged), "collapsed": sum(judged), "low": low, "high": high},
        "metrics": _estimates(runs, METRICS, lambda run: run.metrics) if trained else {},
        "seconds": _estimates(runs, SECONDS, lambda run: run.seconds) if trained else {},
        "rollout_seconds_per_1k_tokens": _estimate(runs, _cost) if trained else None,
        "guidance_bytes": _estimate(runs, _guidance) if trained else None,
        "curve": _curve([run.accuracy for run in runs]) if trained else [],
        "series": {key: _curve([run.series.get(key, ()) for run in runs]) for key in SERIES} if trained else {},
    }


def _difference(runs: Sequence[RunRecord], base: Mapping[int, RunRecord], value: Value) -> dict[str, Any] | None:
    pairs = [(value(run), value(base[run.seed])) for run in runs if run.seed in base]
    found = estimate([mine - other for mine, other in pairs if mine is not None and other is not None])
    return None if found is None else found.to_json()


def _deployed(precision: str) -> Value:
    return lambda run: 0.0 if run.status == "broken" else run.deployed.get(precision)


def _cost(run: RunRecord) -> float | None:
    seconds = run.seconds.get("time/rollout")
    return 1000 * seconds / run.tokens if seconds is not None and run.tokens else None


def _guidance(run: RunRecord) -> float | None:
    size = run.metrics.get("align/bytes_per_token")
    return None if size is None else size * run.tokens


def _estimate(runs: Sequence[RunRecord], value: Value) -> dict[str, Any] | None:
    found = estimate([v for run in runs if (v := value(run)) is not None])
    return None if found is None else found.to_json()


def _estimates(
    runs: Sequence[RunRecord], keys: Iterable[str], table: Callable[[RunRecord], Mapping[str, float]]
) -> dict[str, Any]:
    found = {key: _estimate(runs, lambda run, key=key: table(run).get(key)) for key in keys}  # type: ignore[misc]
    return {key: value for key, value in found.items() if value}


def _curve(series: Sequence[Sequence[tuple[float, float]]]) -> list[list[float]]:
    """[step, mean, least, most] over the runs that have a value at that step."""
    at: dict[float, list[float]] = {}
    for points in series:
        for step, value in points:
            at.setdefault(step, []).append(value)
    return [[step, sum(sorted(v)) / len(v), min(v), max(v)] for step, v in sorted(at.items())]


def _unlike(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Keys outside the arm that differ between runs of one group, with their values: such runs are no fair comparison.

    Keys of the learner and the objective may be an arm's own; only task, model and budget are looked at.
    """
    shared = ("env.", "eval.", "model.", "rollout.", "train.")
    keys = sorted({key for run in runs for key in run.setting if key.startswith(shared)})
    values = {key: sorted({str(run.setting.get(key, "absent")) for run in runs}) for key in keys}
    return {key: found for key, found in values.items() if len(found) > 1}
