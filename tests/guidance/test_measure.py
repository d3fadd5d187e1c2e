"""Comparing the learner's codes with the rollout's."""

from __future__ import annotations

import pytest
import torch

from halfbyte import formats
from halfbyte.formats import PayloadBits
from halfbyte.guidance import measure
from halfbyte.guidance.batch import Guide
from halfbyte.guidance.measure import Observer
from halfbyte.kernels import active
from halfbyte.models.precision import precision_from


@pytest.mark.parametrize("bits", [4, 2, 1])
@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("changed", ["nothing", "a code", "a scale"])
def test_the_short_way_of_equal_codes_counts_as_the_long_one(
    bits: PayloadBits, thorough: bool, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    spec, kernels = precision_from("w4a4kv4").activation_spec, active()
    rollout, payload = kernels.quantise_with_payload(x, spec, bits)
    guide = Guide(0, "qkv_in", payload, torch.ones(16, dtype=torch.bool))
    own = x.clone()
    small = int((formats.unpack_codes(rollout.codes)[3] == 1).nonzero()[0])  # half a step: zero is its neighbour
    own[3, small] *= 0.0 if changed == "a code" else 1.0
    own[3] *= 2.0 if changed == "a scale" else 1.0
    found = []
    for short in (True, False):
        if not short:
            monkeypatch.setattr(measure, "_same", lambda *_: (False, False))
        observer = Observer(kernels, 16, thorough=thorough)
        observer.see(own, guide)
        found.append(observer.found[0, "qkv_in"])
    assert found[0] == found[1]
    both = (formats.quantise(own, spec), formats.quantise(x, spec))
    told = [formats.residues(formats.unpack_codes(q.codes), bits) for q in both]
    assert found[0].mismatched == int((told[0] != told[1]).sum())
    assert (found[0].mismatched > 0) == (changed == "a code")
    effective = [q.scale_values() * q.multiplier().unsqueeze(-1) for q in both]
    assert found[0].scales == int((effective[0] != effective[1]).sum())
    assert (found[0].scales > 0) == (changed == "a scale")
    if bits == 4:
        assert found[0].size == pytest.approx(float(kernels.dequantise(rollout).double().square().sum()))
