"""Which segments are suspicious: the test of direction, the budget, the healthy reference, refused values."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from damaged_batch import damaged
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import CheckpointError, ConfigError
from halfbyte.objective import (
    CorrectionInput,
    StatefulCorrection,
    Triage,
    make_correction,
)
from halfbyte.objective.selection import direction_p_value, select_within


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(1, 9)), max_size=12),
    budget=st.integers(0, 60),
)
def test_selection_takes_the_highest_scores_and_ties_together(rows: list[tuple[int, bool, int]], budget: int) -> None:
    left, expected = float(budget), set()
    for level in sorted({s for s, ok, _ in rows if ok}, reverse=True):
        group = [i for i, (s, ok, _) in enumerate(rows) if ok and s == level]
        left -= sum(rows[i][2] for i in group)
        if left < 0:
            break
        expected |= set(group)
    found = select_within(
        torch.tensor([float(s) for s, _, _ in rows]),
        torch.tensor([ok for _, ok, _ in rows], dtype=torch.bool),
        torch.tensor([float(n) for _, _, n in rows]),
        budget,
    )
    assert set(found.nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_the_p_value_bounds_the_exact_chance_of_random_signs(count: int) -> None:
    """All 2^n signs of random weights are counted."""
    random = torch.Generator().manual_seed(count)
    for _ in range(20):
        weights = torch.rand(count, generator=random, dtype=torch.float64) ** 3
        weights = weights / weights.norm()
        signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * count).reshape(-1, count)
        sums = signs @ weights
        t = sums.unique()
        exact = torch.stack([(sums >= x - 1e-12).double().mean() for x in t])
        assert bool((exact[t > 0] <= direction_p_value(t[t > 0]) + 1e-12).all())


def test_many_short_segments_that_agree_are_found_and_undirected_ones_of_any_size_are_not() -> None:
    """Six tokens each: none is a discovery on its own."""
    random = torch.Generator().manual_seed(0)
    ones = torch.ones(200 * 6)
    gap = 0.03 * torch.randn(1200, generator=random)
    gap[: 20 * 6] -= 0.8
    tokens = CorrectionInput(
        gap=gap, advantages=-ones, mask=ones > 0, sequence_index=torch.arange(200).repeat_interleave(6)
    )
    healthy = {"loc": 0.012, "scale": 0.01, "length": 6.0, "batches": 8.0}
    triage = Triage(q_max=1.0).with_state(healthy)
    assert float(direction_p_value(triage.diagnose(tokens).segments.direction).min()) > 0.1 / 200
    assert triage.diagnose(tokens).selected.nonzero()[:, 0].tolist() == list(range(20))
    signs = torch.where(torch.rand(200, generator=random) < 0.5, 1.0, -1.0).repeat_interleave(6)
    for undirected in (gap.abs() * 30 * torch.randn(1200, generator=random).sign(), gap.abs() * 30 * signs):
        found = triage.diagnose(dataclasses.replace(tokens, gap=undirected))
        assert not bool(found.selected.any())


@pytest.mark.parametrize(("contracting", "found"), [(0, 40), (3, 40), (10, 0), (40, 0)])
def test_contraction_beyond_a_tenth_of_the_candidates_takes_them_all_back(contracting: int, found: int) -> None:
    """Even where the two counts differ far beyond chance: too many of the candidates would be chance ones."""
    random = torch.Generator().manual_seed(1)
    gap = 0.03 * torch.randn(1200, generator=random)
    gap[: 40 * 6] -= 0.8
    gap[40 * 6 : (40 + contracting) * 6] += 0.8
    ones = torch.ones(1200)
    tokens = CorrectionInput(
        gap=gap, advantages=-ones, mask=ones > 0, sequence_index=torch.arange(200).repeat_interleave(6)
    )
    triage = Triage(q_max=1.0).with_state({"loc": 0.012, "scale": 0.01, "length": 6.0, "batches": 8.0})
    assert int(triage.diagnose(tokens).selected.sum()) == found


def test_a_batch_relative_reference_goes_blind_and_a_frozen_one_does_not() -> None:
    """Every segment of A < 0 is damaged alike."""
    random = torch.Generator().manual_seed(0)
    ones = torch.ones(64 * 32)
    fields: dict[str, Any] = {
        "advantages": -ones,
        "mask": ones > 0,
        "sequence_index": torch.arange(64).repeat_interleave(32),
    }
    healthy = CorrectionInput(gap=0.05 * torch.randn(64 * 32, generator=random), **fields)
    sick = CorrectionInput(gap=0.05 * torch.randn(64 * 32, generator=random) - 0.4, **fields)
    frozen = Triage(reference_batches=1, q_max=1.0)
    frozen = frozen.with_state(frozen(healthy).state or {})
    assert bool(frozen.diagnose(sick).selected.all())
    assert not bool(frozen.diagnose(healthy).selected.any())
    assert not bool(Triage(reference="batch", q_max=1.0).diagnose(sick).selected.any())


def test_reference_is_a_mean_of_the_first_batches_and_then_frozen_or_slow() -> None:
    for kind in ("frozen", "ema"):
        triage = Triage(reference=kind, reference_batches=2, ema_decay=0.9)
        assert triage.state() == {}
        assert isinstance(triage, StatefulCorrection)
        states = []
        for seed in range(4):
            result = triage(damaged(seed))
            assert result.state is not None
            states.append(dict(result.state))
            assert triage.state() == (states[-2] if len(states) > 1 else {}), "calling it changes nothing"
            triage = triage.with_state(result.state)
        own = [Triage(reference="batch").diagnose(damaged(seed)).reference for seed in (0, 1)]
        assert states[0]["loc"] == pytest.approx(own[0].loc)
        assert states[1]["loc"] == pytest.approx((own[0].loc + own[1].loc) / 2)
        if kind == "frozen":
            assert states[1] == states[2] == states[3]
        else:
            found = (
                Triage(reference=kind, reference_batches=2, ema_decay=0.9).with_state(states[1]).diagnose(damaged(2))
            )
            healthy = found.segments.amplification[~found.verdict.suspicious]
            assert states[2]["loc"] == pytest.approx(0.9 * states[1]["loc"] + 0.1 * float(healthy.median()))


def test_bad_parameters_and_states_are_refused() -> None:
    for options in (
        {"e_min": -1.0},
        {"z_min": math.nan},
        {"i_min": 1.0},
        {"alpha": 0.0},
        {"alpha": 1.5},
        {"floor": 0.0},
        {"q_max": 1.5},
        {"strength": -1.0},
        {"w_min": 0.0},
        {"w_min": 1.1},
        {"w_max": 0.9},
        {"g_sev": 0.0},
        {"variant": "mask"},
        {"reference": "none"},
        {"reference_batches": 0},
        {"ema_decay": 1.0},
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            make_correction("triage", **options)
    with pytest.raises(ConfigError, match="no option 'memory'"):
        make_correction("triage", memory=1.0)
    for state in ({"loc": 0.1}, {"loc": 0.0, "scale": -1.0, "length": 1.0, "batches": 1.0}, {"loc": "x"}):
        with pytest.raises(CheckpointError, match="reference statistics"):
            Triage().with_state(state)
