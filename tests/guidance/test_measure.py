"""Comparing the learner's codes with the rollout's."""

from __future__ import annotations

import pytest
import torch

from halfbyte.guidance import measure
from halfbyte.guidance.batch import Guide
from halfbyte.guidance.measure import Observer
from halfbyte.kernels import active
from halfbyte.models.precision import precision_from


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("changed", [False, True])
def test_the_short_way_of_equal_codes_counts_as_the_long_one(
    thorough: bool, changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    spec, kernels = precision_from("w4a4kv4").activation_spec, active()
    payload = kernels.quantise_with_payload(x, spec, 4)[1]
    guide = Guide(0, "qkv_in", payload, torch.ones(16, dtype=torch.bool))
    own = x.clone()
    own[3, 5] += 1.0 if changed else 0.0
    found = []
    for short in (True, False):
        if not short:
            monkeypatch.setattr(measure, "_same", lambda *_: False)
        observer = Observer(kernels, 16, thorough=thorough)
        observer.see(own, guide)
        found.append(observer.found[0, "qkv_in"])
    assert found[0] == found[1]
    assert (found[0].mismatched > 0) == changed
    assert found[0].size == pytest.approx(float(kernels.dequantise(payload.quantised()).double().square().sum()))
