"""The same update in FP4 coordinates: bits a parameter under global scales that are recomputed, frozen or hysteretic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import rich.table
import torch

from halfbyte.formats import QuantTensor, StableScales, dequantise, get_spec
from halfbyte.formats.stable_scale import next_global
from halfbyte.kernels import active
from halfbyte.refit.arrays import flat_bytes
from halfbyte.refit.codec import encode

__all__ = ["Fp4Row", "fp4_rows", "fp4_table"]

Policy = Literal["recompute", "frozen", "hysteretic"]
POLICIES: tuple[Policy, ...] = ("recompute", "frozen", "hysteretic")
ROWS, COLUMNS = 1024, 1024


@dataclass(frozen=True)
class Fp4Row:
    """One rule and policy on one update.

    Arguments:
        rule: of the global scale: ``amax`` (amax / 2688, as most libraries) or ``power of two`` (ours).
        change_rate: share of BF16 weights that changed.
        changed_codes: share of codes that changed.
        avalanches, matrices: global scales that moved, of how many.
        bits_per_parameter: size of the update with our codec, codes, scales and global scales.
        relative_error: mean square error of the quantised weights over that of recomputing the scale.
    """

    rule: str
    policy: str
    change_rate: float
    changed_codes: float
    avalanches: int
    matrices: int
    bits_per_parameter: float
    relative_error: float

    def to_json(self) -> dict[str, Any]:
        """One flat JSON object."""
        return asdict(self)


def fp4_rows(
    base: npt.NDArray[np.uint16], target: npt.NDArray[np.uint16], *, touch_top: bool = True
) -> Iterator[Fp4Row]:
    """Rows of every rule and policy, for the weights as matrices of 1024 x 1024 (what does not fill one is left out).

    Arguments:
        base, target: BF16 bits [n].
        touch_top: the largest weight of every matrix moves by one BF16 step as well: the update that sets off an avalanche.
    """
    count = base.size // (ROWS * COLUMNS)
    before, after = (
        torch.from_numpy(bits[: count * ROWS * COLUMNS].copy()).view(torch.bfloat16).view(count, ROWS, COLUMNS)
        for bits in (base, target)
    )
    if touch_top:
        flat = after.view(count, -1)
        top = flat.float().abs().argmax(1)
        flat.view(torch.int16)[torch.arange(count), top] += 1
    rate = float((before.view(torch.int16) != after.view(torch.int16)).float().mean())
    for rule, rounding in (("amax", "none"), ("power of two", "power_of_two")):
        error = 0.0
        for policy in POLICIES:
            spec = get_spec("halfbyte").replace(global_rounding=rounding, global_update=policy)
            scales = StableScales(spec)
            size = changed = 0
            squares = 0.0
            for i in range(count):
                parts = [_quantised(scales, f"w{i}", w) for w in (before[i], after[i])]
                size += _delta_bytes(*parts)
                difference = parts[0].codes ^ parts[1].codes
                changed += int((difference & 15 != 0).sum()) + int((difference > 15).sum())
                squares += float((dequantise(parts[1]) - after[i].float()).square().mean())
            error = squares if policy == "recompute" else error
            total = count * ROWS * COLUMNS
            yield Fp4Row(
                rule,
                policy,
                rate,
                changed / total,
                scales.avalanches,
                count,
                8 * size / total,
                squares / max(error, 1e-30),
            )


def _quantised(scales: StableScales, name: str, w: torch.Tensor) -> QuantTensor:
    if scales.spec.global_update == "recompute":  # the series counts avalanches all the same
        known = scales.current.get(name)
        scale = next_global(known, w.abs().amax().float(), scales.spec)
        scales.avalanches += known is not None and not torch.equal(known, scale)
        scales.current[name] = scale
    else:
        scale = scales.update({name: [w]}).of(name)
    return active().quantise(w, scales.spec, global_scale=scale, name=name)


def _delta_bytes(before: QuantTensor, after: QuantTensor) -> int:
    pairs = (("F4", "codes"), ("F8_E4M3", "scales"), ("F32", "global_scale"))
    deltas = (encode(dtype, flat_bytes(getattr(before, p)), flat_bytes(getattr(after, p)), "max") for dtype, p in pairs)
    return sum(delta.n_bytes for delta in deltas if not delta.is_noop)


def fp4_table(rows: list[Fp4Row]) -> rich.table.Table:
    """One line a rule and policy."""
    out = rich.table.Table("rule", "global scale", title="the same in FP4 coordinates", title_justify="left")
    for name in ("BF16 changed", "codes changed", "avalanches", "bits a parameter", "error, recomputed = 1"):
        out.add_column(name, justify="right")
    for row in rows:
        out.add_row(
            row.rule,
            row.policy,
            f"{row.change_rate:.2%}",
            f"{row.changed_codes:.4%}",
            f"{row.avalanches} of {row.matrices}",
            f"{row.bits_per_parameter:.4f}",
            f"{row.relative_error:.4f}",
        )
    return out
