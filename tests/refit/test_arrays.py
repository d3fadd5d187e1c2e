"""Arrays as bytes: whatever holds them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.refit.arrays import DTYPE_BITS, TensorInfo, flat_bytes, info_of, infos_of, writable_bytes
from halfbyte.refit.errors import RefitError

ROOT = Path(__file__).parents[2]


def test_the_package_imports_without_torch() -> None:
    code = (
        "import sys, halfbyte.refit, halfbyte.refit.codec as c, halfbyte.refit.manifest, halfbyte.refit.objects\n"
        "import halfbyte.refit.groups, halfbyte.refit.state\n"
        "c.available(); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16,
        torch.int16, torch.float16, torch.bfloat16, torch.uint32, torch.int32, torch.float32, torch.uint64, torch.int64,
        torch.float64, torch.complex64,
    ],
)  # fmt: skip
def test_every_torch_dtype_has_the_bytes_safetensors_writes(dtype: torch.dtype) -> None:
    from safetensors.torch import save

    raw = torch.arange(48, dtype=torch.uint8)
    tensor = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
    info = info_of("x", tensor)
    assert DTYPE_BITS[info.dtype] == 8 * dtype.itemsize
    data = save({"x": tensor})
    assert f'"dtype":"{info.dtype}"'.encode() in data
    assert data.endswith(flat_bytes(tensor).tobytes())
    assert info.bytes == flat_bytes(tensor).size


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_0_d_empty_and_strided(make: Any) -> None:
    scalar, square = make(1.5), make([[1, 2, 3], [4, 5, 6]])
    assert flat_bytes(scalar).size == scalar.itemsize if make is np.array else scalar.element_size()
    assert info_of("s", scalar).shape == ()
    assert flat_bytes(square[:0]).size == 0
    assert info_of("e", square[:0]).shape == (0, 3)
    turned = square.T
    assert flat_bytes(turned).view(np.int64).tolist() == [1, 4, 2, 5, 3, 6]
    assert flat_bytes(square[:, ::2]).view(np.int64).tolist() == [1, 3, 4, 6]
    with pytest.raises(RefitError, match="in place"):
        writable_bytes(turned)


def test_a_view_where_it_can_be_and_read_only() -> None:
    for array in (np.zeros(4, np.float32), torch.zeros(4)):
        view = flat_bytes(array)
        assert not view.flags.writeable
        writable_bytes(array)[3] = 0x40
        assert float(array[0]) == 2.0
        assert view[3] == 0x40, "no copy of contiguous memory"


def test_parameters_conjugates_and_negatives() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    writable_bytes(parameter)[:4] = 0
    assert parameter.tolist() == [0.0, 1.0, 1.0]
    z = torch.tensor([1 + 2j]).conj()
    assert flat_bytes(z).view(np.float32).tolist() == [1.0, -2.0]
    with pytest.raises(RefitError):
        writable_bytes(z)


def test_arrays_without_plain_bytes_are_refused() -> None:
    with pytest.raises(RefitError, match="no bytes"):
        flat_bytes(np.array([object()]))
    with pytest.raises(RefitError, match="no bytes"):
        flat_bytes(np.zeros(2, ">f4"))
    with pytest.raises(RefitError, match="complex128"):
        info_of("x", np.zeros(2, np.complex128))
    locked = np.zeros(2)
    locked.flags.writeable = False
    with pytest.raises(RefitError, match="read-only"):
        writable_bytes(locked)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("F3", (1,)), ("BF16", (-1,)), ("BF16", (2**40, 2**40)), ("F4", (3,)), ("BF16", (1.0,)), ("BF16", (True,))],
)
def test_infos_that_cannot_be_are_refused(dtype: str, shape: Any) -> None:
    with pytest.raises(RefitError):
        TensorInfo("x", dtype, shape)


def test_sizes_beyond_2_to_the_32() -> None:
    info = TensorInfo("x", "F4", (2**20, 2**15))
    assert (info.elements, info.bytes) == (2**35, 2**34)
    assert list(infos_of({"b": np.zeros(1), "a": np.zeros(1)})) == ["b", "a"]
