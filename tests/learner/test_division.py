"""Samples over ranks: each once, evenly, and with as many passes on every rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfbyte.learner.batch import micro_batches
from halfbyte.learner.division import divide, passes


@given(lengths=st.lists(st.integers(2, 50), max_size=40), size=st.integers(1, 5))
def test_every_sample_goes_to_one_rank_and_no_rank_has_much_more(lengths: list[int], size: int) -> None:
    parts = divide(lengths, size)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts)
    loads = [sum(lengths[i] for i in part) for part in parts]
    if lengths:
        assert max(loads) - min(loads) <= max(lengths), "longest first, to the least loaded (Graham 1969)"


@given(
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=30),
    size=st.integers(1, 4),
    budget=st.integers(1, 200),
    packing=st.booleans(),
)
def test_all_ranks_make_as_many_passes_and_count_every_sample_once(
    lengths: list[int], size: int, budget: int, packing: bool
) -> None:
    found = [passes(lengths, budget, packing=packing, rank=rank, size=size) for rank in range(size)]
    assert len({len(of_rank) for of_rank in found}) == 1
    counted = [i for of_rank in found for one in of_rank if one.counts for i in one.samples]
    assert sorted(counted) == list(range(len(lengths)))
    assert all(one.samples for of_rank in found for one in of_rank)
    for of_rank in found:
        for one in of_rank:
            own = [lengths[i] for i in one.samples]
            assert len(own) == 1 or (sum(own) if packing else max(own) * len(own)) <= budget
    if size == 1:
        assert [one.samples for one in found[0]] == micro_batches(lengths, budget, packing=packing)
