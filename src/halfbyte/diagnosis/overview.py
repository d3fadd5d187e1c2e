"""A diagnosis in words and tables."""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.diagnosis.diagnose import Diagnosis
from halfbyte.diagnosis.tokens import TokenTable
from halfbyte.errors import ConfigError
from halfbyte.objective import QUADRANTS

__all__ = ["chosen_table", "facts", "text_tables"]

_SIGNS = {"neg": "-", "pos": "+"}


def chosen_table(tables: Sequence[TokenTable], step: int | None) -> TokenTable:
    """The table of a step; the last one without.

    Raises:
        ConfigError: there is no such step.
    """
    if step is None:
        return tables[-1]
    found = [table for table in tables if table.step == step]
    if not found:
        known = ", ".join(str(table.step) for table in tables)
        raise ConfigError(f"there is no step {step}", where="--step", expected=f"one of: {known}")
    return found[0]


def facts(found: Diagnosis) -> list[tuple[str, str, str]]:
    """(name, value, remark) for the head of a page."""
    numbers, table = found.numbers, found.table
    out = [("tokens", f"{int(numbers['gap/tokens'])}", f"in {len(table.lengths)} responses")]
    if table.step is not None:
        out.insert(0, ("step", str(table.step), ""))
    for key, name, remark in (
        ("gap/mean_abs", "mean |gap|", "nats per token"),
        ("gap/k3_kl", "k3 KL", "rollout to learner, nats per token"),
        ("gap/ess", "effective sample size", "of the weights learner / rollout"),
        ("quadrant/amplification", "amplification", "-1 contracts, 0 no direction, 1 amplifies"),
        ("segment/over_threshold", "suspicious segments", "share, the leading indicator"),
    ):
        if key in numbers:
            out.append((name, f"{numbers[key]:.3g}", remark))
    return out


def text_tables(found: Diagnosis) -> list[tuple[str, list[list[str]]]]:
    """(title, rows with their head): the quadrants, what corrections would do, and the other numbers."""
    numbers = found.numbers
    quadrant = [["quadrant (A, g)", "tokens", "update mass", "mean |g|", "update"]]
    for name in QUADRANTS:
        a, g = (_SIGNS[part] for part in name.split("_"))
        cells = [_percent(numbers.get(f"quadrant/{key}_{name}")) for key in ("share", "mass")]
        gap = numbers.get(f"quadrant/gap_{name}")
        effect = "amplifies the gap" if a == g else "contracts the gap"
        quadrant.append([f"({a}, {g})", *cells, "-" if gap is None else f"{gap:.4g}", effect])
    out = [("Sign structure", quadrant)]
    if found.effects:
        rows = [["correction", "mass kept", "tokens changed", "tokens rejected", "weights"]]
        for name, done in found.effects.items():
            shares = [_percent(value) for value in (done.mass_kept, done.changed, done.rejected)]
            rows.append([name, *shares, f"{done.weight_min:.3g} to {done.weight_max:.3g}"])
        out.append(("What each correction would do, with its defaults", rows))
    shown = {key: value for key, value in numbers.items() if not key.startswith("quadrant/") or key.count("_") == 0}
    out.append(("Numbers", [["metric", "value"], *([key, f"{value:.6g}"] for key, value in sorted(shown.items()))]))
    return out


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"
