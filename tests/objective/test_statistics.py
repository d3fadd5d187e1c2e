"""Mergeable metrics: any split gives the numbers of the whole."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.objective import extreme_of, mean_of, merge, read, total_of


def statistics(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    return {
        "mean": mean_of(tensor),
        "share": mean_of(tensor > 0),
        "sum": total_of(tensor),
        "max": extreme_of(tensor, "max"),
        "min": extreme_of(tensor, "min"),
    }


@settings(max_examples=40)
@given(parts=st.lists(st.lists(st.floats(-100, 100, width=32), max_size=6), max_size=5))
def test_merged_parts_equal_the_whole(parts):
    whole = [value for part in parts for value in part]
    merged = read(merge(statistics(part) for part in parts))
    if not whole:
        assert merged == {}
        return
    assert merged["mean"] == pytest.approx(math.fsum(whole) / len(whole), abs=1e-9)
    assert merged["share"] == pytest.approx(sum(v > 0 for v in whole) / len(whole))
    assert merged["sum"] == pytest.approx(math.fsum(whole), abs=1e-9)
    assert (merged["max"], merged["min"]) == (max(whole), min(whole))


def test_a_name_missing_from_one_part():
    assert read(merge([{"a": mean_of(torch.tensor([1.0]))}, {"b": total_of(torch.tensor([2.0]))}])) == {"a": 1, "b": 2}


def test_statistics_hold_no_graph():
    values = torch.ones(3, requires_grad=True)
    assert not any(s.total.requires_grad for s in (mean_of(values), total_of(values), extreme_of(values, "max")))
