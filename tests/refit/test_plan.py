"""The cost model: its arithmetic against hand calculations, its limits, and the cross-region case."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from halfbyte.bench.refit_traces import TRACES, AdamTrace
from halfbyte.errors import ConfigError
from halfbyte.refit.codec import encode
from halfbyte.refit.plan import CROSS_REGION, POSITION_AND_VALUE, Scenario, bytes_per_change, over_rates, plan


def test_sizes_and_seconds_by_hand() -> None:
    s = Scenario(
        parameters=1e9, change_rate=0.5, link=1e8, ranks=4, copies=2, encode_threads=2, encode_rate=5e9, apply_rate=1e10,
        hash_rate=1e9, latency=0.1, operations=5, pause=0.2,
    )  # fmt: skip
    cost = plan(s)
    per_change = (
        POSITION_AND_VALUE["fast"][0] * 2 / 8 + POSITION_AND_VALUE["fast"][1]
    )  # one of two changes: two bits a position
    assert cost.full_bytes == 4e9
    assert cost.delta_bytes == pytest.approx(1e9 * 0.5 * per_change * 2)
    assert cost.full_seconds == pytest.approx({"transfer": 40, "store": 0.5, "load": 0.5})
    assert cost.delta_seconds == pytest.approx(
        {"encode": 0.2, "transfer": 5e8 * per_change * 2 / 1e8, "store": 0.5, "apply": 0.05, "pause": 0.2}
    )
    assert cost.speedup == pytest.approx(cost.full_total / cost.delta_total)


@pytest.mark.parametrize("trace", sorted(TRACES))
@pytest.mark.parametrize("profile", ["fast", "max"])
def test_bytes_per_change_are_what_the_codec_needs(trace: str, profile: Any) -> None:
    base, target = AdamTrace(1 << 20, *TRACES[trace]).step()
    delta = encode("BF16", base.view(np.uint8), target.view(np.uint8), profile)
    needed = delta.n_bytes / delta.changed
    predicted = bytes_per_change(delta.changed / len(base), profile)
    assert needed == pytest.approx(predicted, rel=0.05)


def test_bytes_per_change_at_the_ends() -> None:
    assert bytes_per_change(0.0) == 0.0
    assert bytes_per_change(1.0) == POSITION_AND_VALUE["fast"][1]
    assert all(bytes_per_change(p) * p <= 2 for p in (1e-6, 0.1, 0.9, 0.999))
    rates = [i / 1000 for i in range(1, 400)]
    costs = [p * bytes_per_change(p) for p in rates]
    assert costs == sorted(costs)


def test_the_cross_region_case_is_of_the_reported_size() -> None:
    """arXiv 2610.08430: 87.5 minutes for all of 1T parameters, 150 s at 3%, 12 to 40 times at 3 to 5%."""
    cost = plan(CROSS_REGION)
    assert cost.full_seconds["transfer"] == pytest.approx(87.5 * 60)
    assert 75 < cost.delta_total < 150, "less than was reported there: fewer bytes a change"
    at_5 = plan(replace(CROSS_REGION, change_rate=0.05))
    assert 30 < at_5.speedup < cost.speedup


def test_a_denser_change_never_costs_less() -> None:
    totals = [cost.delta_total for cost in over_rates(CROSS_REGION)]
    assert totals == sorted(totals)


@pytest.mark.parametrize(
    ("field", "value"),
    [("parameters", 0), ("link", -1), ("change_rate", 3), ("change_rate", math.nan), ("ranks", 0), ("profile", "best")],
)
def test_nonsense_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(CROSS_REGION, **{field: value})
