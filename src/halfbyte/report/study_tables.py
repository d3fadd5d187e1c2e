"""The results of a study as tables of text: for the page, the terminal and Markdown. Reads the content of ``study.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from halfbyte.html.scale import number
from halfbyte.html.table import Table

__all__ = ["status_line", "study_tables"]

NONE = "-"


def study_tables(data: Mapping[str, Any]) -> list[tuple[str, list[Table]]]:
    """(name, tables) of every group of runs."""
    return [(group["name"], _tables(group, data["reference"])) for group in data["groups"]]


def status_line(data: Mapping[str, Any]) -> str:
    """How much of the study is there."""
    done = f"{data['finished']} of {data['planned']} runs finished"
    return done if data["complete"] else f"{done}: an interim look, by the rules of the final one"


def _tables(group: Mapping[str, Any], reference: str) -> list[Table]:
    rows = group["arms"]
    precisions = sorted({p for row in rows for p in row["deployed"]})
    front = set(group["pareto"])
    accuracy = [["arm", "seeds", "final", "95%", "area", *(f"in {p}" for p in precisions), "collapsed", "95%"]]
    for row in rows:
        collapse = row["collapse"]
        judged = collapse["runs"] > 0
        accuracy.append(
            [
                row["arm"] + (" *" if row["arm"] in front else ""),
                str(len(row["seeds"])),
                _mean(row["final"]),
                _range(row["final"]),
                _mean(row["area"]),
                *(_mean(row["deployed"].get(p)) for p in precisions),
                f"{collapse['collapsed']}/{collapse['runs']}" if judged else NONE,
                f"{collapse['low']:.2f} to {collapse['high']:.2f}" if judged else NONE,
            ]
        )
    keys = [("final", "final"), ("area", "area"), *((f"deployed/{p}", f"in {p}") for p in precisions)]
    paired = [["arm", "accuracy", "pairs", "points", "bootstrap 95%", "t 95%"]]
    for row in rows:
        found = row["differences"]
        paired += [
            [row["arm"], name, str(found[key]["n"]), *_points(found[key])] for key, name in keys if found.get(key)
        ]
    tables = [Table("Accuracy (* no arm is both better and cheaper in rollout)", accuracy)]
    if len(paired) > 1:
        tables.append(Table(f"Difference to {reference}, paired by seed", paired))
    tables += [Table("Mismatch and training, means over steps", _metrics(rows)), Table("Cost", _costs(rows))]
    deltas = _deltas(rows)
    if len(deltas) > 1:
        tables.append(Table("Weight updates, means over steps", deltas))
    if group["differing_settings"]:
        unlike = [["key", "values"], *([key, ", ".join(values)] for key, values in group["differing_settings"].items())]
        tables.append(Table("Not a fair comparison: runs of this group differ beside the arm", unlike))
    return tables


def _metrics(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    columns = (
        ("gap/mean_abs", "mean |gap|"),
        ("gap/k3_kl", "k3 KL"),
        ("parity/max_gap", "max gap, parity"),
        ("entropy/mean", "entropy"),
        ("optim/grad_norm", "gradient norm"),
        ("weight/mean", "mean weight"),
        ("align/code_mismatch", "codes that differ"),
    )
    return _numbers(rows, columns, lambda row, key: row["metrics"].get(key))


def _costs(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    head = ["arm", "rollout s", "learner s", "publish s", "rollout s / 1k tokens", "guidance bytes", "bytes / token"]
    out = [head]
    for row in rows:
        if row["trained"]:
            seconds = [row["seconds"].get(key) for key in ("time/rollout", "time/learner", "time/publish")]
            sizes = [row["guidance_bytes"], row["metrics"].get("align/bytes_per_token")]
            cells = [*seconds, row["rollout_seconds_per_1k_tokens"], *sizes]
            out.append([row["arm"], *(_number(cell) for cell in cells)])
    return out


def _deltas(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    columns = (
        ("refit/changed", "BF16 weights changed"),
        ("refit/changed_codes", "FP4 codes changed"),
        ("refit/changed_scales", "FP4 scales changed"),
        ("refit/avalanches", "avalanches"),
        ("refit/bytes", "bytes a version"),
        ("refit/full_bytes", "full bytes"),
    )
    return _numbers(rows, columns, lambda row, key: row["metrics"].get(key))


def _numbers(rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str]], cell: Any) -> list[list[str]]:
    shown = [(key, title) for key, title in columns if any(cell(row, key) for row in rows)]
    body = [[row["arm"], *(_number(cell(row, key)) for key, _ in shown)] for row in rows if row["trained"]]
    return [["arm", *(title for _, title in shown)], *body]


def _mean(found: Mapping[str, Any] | None) -> str:
    return NONE if found is None else f"{found['mean']:.3f}"


def _number(found: Mapping[str, Any] | None) -> str:
    return NONE if found is None else number(found["mean"])


def _range(found: Mapping[str, Any] | None) -> str:
    return NONE if found is None or found["low"] is None else f"{found['low']:.3f} to {found['high']:.3f}"


def _points(found: Mapping[str, Any]) -> list[str]:
    """Mean difference in points, and its two intervals."""
    mean = f"{100 * found['mean']:+.1f}"
    if found["low"] is None:
        return [mean, "one seed", "one seed"]
    return [
        mean,
        *(f"{100 * found[a]:+.1f} to {100 * found[b]:+.1f}" for a, b in (("low", "high"), ("t_low", "t_high"))),
    ]
