"""The library specs against codes, scales and global scales that the libraries wrote (versions in the file)."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from halfbyte.formats import get_spec, quantise, unpack_codes

LIBRARIES = {
    "torchao": "nvfp4.torchao",
    "modelopt": "nvfp4.modelopt",
    "compressed_tensors": "nvfp4.compressed_tensors",
    "fouroversix_static6": "nvfp4.fouroversix_static6",
    "fouroversix_mse": "nvfp4.fouroversix_mse",
    "mx_floor": "mxfp4.torchao_floor",
    "mx_even": "mxfp4.torchao_even",
    "mx_rceil": "mxfp4.torchao_rceil",
    "mx_modelopt": "mxfp4.modelopt",
}
# torchao and modelopt divide 0 by a global scale of 0: their scale bytes are NaN and the codes mean nothing.
UNDEFINED = {("torchao", "all_zero"), ("modelopt", "all_zero")}


@functools.cache
def vectors() -> dict[str, Tensor]:
    return dict(load_file(Path(__file__).parents[1] / "data" / "vectors.safetensors"))


CASES = sorted({key.split(".")[0] for key in vectors()})


def test_every_case_of_the_file_is_compared() -> None:
    assert len(CASES) == 12
    assert {key.split(".", 2)[2].rsplit(".", 1)[0] for key in vectors() if "fp4." in key} == set(LIBRARIES.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", LIBRARIES)
def test_library_bits(name: str, case: str, dtype: str) -> None:
    stored = {
        part: vectors()[f"{case}.{dtype}.{LIBRARIES[name]}.{part}"] for part in ("codes", "scale_bytes", "global")
    }
    q = quantise(vectors()[f"{case}.{dtype}.input"], get_spec(name))
    assert torch.equal(q.global_scale.reshape(1), stored["global"])
    assert bool(q.dequantise().isfinite().all())
    q.check(case)
    if (name, case) in UNDEFINED:
        assert bool((stored["scale_bytes"] == 0xFF).all())  # if this fails, the library is fixed and the case defined
        assert bool((q.codes == 0).all())
        assert set(q.scales.flatten().tolist()) == {{"torchao": 0x08, "modelopt": 0x38}[name]}
        return
    assert torch.equal(q.scales, stored["scale_bytes"])
    assert torch.equal(unpack_codes(q.codes), stored["codes"])


def test_fouroversix_overflow_is_reproduced_and_can_be_switched_off() -> None:
    """fouroversix 1.0.5 writes code 8 (-0) for a value that belongs at 6; ``saturate`` repairs only those."""
    x = vectors()["wide_range.float32.input"]
    wrapped = quantise(x, get_spec("fouroversix_static6"))
    saturated = quantise(x, get_spec("fouroversix_static6").replace(overflow="saturate"))
    assert torch.equal(wrapped.scales, saturated.scales)
    lost = unpack_codes(wrapped.codes) != unpack_codes(saturated.codes)
    assert int(lost.sum()) == 20
    assert set(unpack_codes(wrapped.codes)[lost].tolist()) == {8}
    assert set((unpack_codes(saturated.codes)[lost] & 7).tolist()) == {7}
