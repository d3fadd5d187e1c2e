"""The published study: the tables of docs/study-results.md are what the committed data give, analysed again from its runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from halfbyte.study.analysis import analyse
from halfbyte.study.records import collect_records

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "study-results.md"
REGIMES = ("gentle", "harsh")


def points(found: Mapping[str, float] | None) -> str:
    """Percentage points with the wider of the two intervals at each end."""
    if found is None:
        return "-"
    low, high = min(found["low"], found["t_low"]), max(found["high"], found["t_high"])
    return f"{100 * found['mean']:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def table(path: Path) -> list[str]:
    """Lines of the page's table of one regime."""
    data = analyse(collect_records([path]))
    (group,) = data["groups"]
    lines = []
    for row in group["arms"]:
        k3: Any = row["metrics"].get("gap/k3_kl") if row["trained"] else None
        differences = row.get("differences") or {}
        collapsed = f"{row['collapse']['collapsed']}/{row['collapse']['runs']}" if row["trained"] else "-"
        cells = (
            row["arm"],
            f"{row['final']['mean']:.3f}",
            "-" if row["arm"] == "bf16" else points(differences.get("final")),
            f"{row['deployed']['w4a4kv4']['mean']:.3f}",
            "-" if row["arm"] in ("bf16", "post-hoc") else points(differences.get("deployed/w4a4kv4")),
            "-" if k3 is None else f"{k3['mean']:.1e}",
            collapsed,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


@pytest.mark.parametrize("regime", REGIMES)
def test_the_tables_of_the_page_are_those_of_the_data(regime: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = re.search(rf"^## The {regime} regime\n(.*?)(?=^## |\Z)", text, re.S | re.M)
    assert section is not None
    found = [line for line in section[1].splitlines() if re.match(r"\| [a-z]", line) and not line.startswith("| arm |")]
    assert found == table(DOCS / "studies" / f"{regime}.json")


@pytest.mark.parametrize("regime", REGIMES)
def test_every_arm_has_five_finished_seeds_and_parity_is_exact(regime: str) -> None:
    records = collect_records([DOCS / "studies" / f"{regime}.json"])
    by_arm: dict[str, set[int]] = {}
    for record in records:
        if record.status == "finished":
            by_arm.setdefault(record.arm, set()).add(record.seed)
    assert len(by_arm) >= 17
    assert all(seeds == set(range(5)) for seeds in by_arm.values())
    parity = [record for record in records if record.arm == "parity"]
    assert {record.metrics["gap/k3_kl"] for record in parity} == {0.0}
    assert {record.metrics["gap/max_abs"] for record in parity} == {0.0}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("arm", ["fp4-naive", "qat", "trace-full", "parity", "post-hoc"])
def test_the_readme_says_what_the_page_says(regime: str, arm: str) -> None:
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in table(DOCS / "studies" / f"{regime}.json") if line.startswith(f"| {arm} |")]
    assert line.split(" | ")[2] in readme
