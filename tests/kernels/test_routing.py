"""Top-k routing: native against reference bit for bit, float64 against both."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ShapeError
from halfbyte.kernels import Kernels, available, get

NAMES = [name for name in available() if name != "native"]


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return get(request.param)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.integers(0, 9),
    st.integers(1, 70),
    st.integers(1, 10),
    st.booleans(),
    st.integers(0, 3),
    st.integers(0, 999),
)
def test_native_equals_reference_with_ties_and_what_is_not_finite(
    name: str, tokens: int, experts: int, k: int, normalise: bool, kind: int, seed: int
) -> None:
    k, g = min(k, experts), torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=g) * 4
    if kind == 1:
        logits = logits.round()  # ties, zeros of both signs
    if kind == 2 and tokens:
        logits[0, seed % experts] = float("inf")
    if kind == 3 and tokens:
        logits[-1, seed % experts] = float("nan")
    ids, gates = get(name).route(logits, k, normalise=normalise)
    expected_ids, expected = get("reference").route(logits, k, normalise=normalise)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, expected_ids)
    assert torch.equal(gates.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("normalise", [False, True])
def test_gates_are_the_softmax_of_the_largest(kernels: Kernels, normalise: bool) -> None:
    logits = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * 3
    ids, gates = kernels.route(logits, 8, normalise=normalise)
    top = torch.topk(logits, 8, dim=1)
    assert torch.equal(ids.long(), top.indices)
    exact = (
        torch.softmax(top.values.double(), 1) if normalise else torch.softmax(logits.double(), 1).gather(1, top.indices)
    )
    torch.testing.assert_close(gates.double(), exact, rtol=1e-6, atol=0)


def test_more_experts_than_there_are_is_refused(kernels: Kernels) -> None:
    for k in (0, 5):
        with pytest.raises(ShapeError, match=r"\(3, 4\)"):
            kernels.route(torch.zeros(3, 4), k, normalise=True)
