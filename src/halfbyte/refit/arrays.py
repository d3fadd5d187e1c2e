"""Arrays as bytes: names of dtypes, shapes, and a flat view of what numpy, torch and safetensors hold.

Nothing here imports torch: a tensor is recognised by its module and methods.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.errors import RefitError

__all__ = ["DTYPE_BITS", "Bytes", "TensorInfo", "flat_bytes", "info_of", "infos_of", "writable_bytes"]

#: One dimension of uint8.
Bytes = npt.NDArray[np.uint8]

#: Safetensors dtype names -> bits of one element.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

_NUMPY = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "float16": "F16", "uint32": "U32",
    "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip  # the last line: torch, and numpy with ml_dtypes

_MOST = 2**63 - 1


@dataclass(frozen=True)
class TensorInfo:
    """Name, safetensors dtype name and shape (of logical elements) of one tensor.

    Raises:
        RefitError: an unknown dtype, a negative size, a size beyond 2**63, or half a byte left over (F4).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BITS:
            raise RefitError(
                f"tensor {self.name!r} has unknown dtype {self.dtype!r}", expected="one of " + ", ".join(DTYPE_BITS)
            )
        if any(type(size) is not int or size < 0 for size in self.shape) or self.elements * 8 > _MOST:
            raise RefitError(
                f"tensor {self.name!r} has shape {list(self.shape)}", expected="sizes >= 0, below 2**60 in all"
            )
        if self.elements * DTYPE_BITS[self.dtype] % 8:
            raise RefitError(
                f"tensor {self.name!r} has an odd number of 4-bit codes", where=f"shape {list(self.shape)}"
            )

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the data."""
        return self.elements * DTYPE_BITS[self.dtype] // 8


def info_of(name: str, array: Any) -> TensorInfo:
    """What a numpy array or torch tensor is.

    Raises:
        RefitError: a dtype that safetensors does not have.
    """
    dtype = str(array.dtype).removeprefix("torch.")
    if dtype not in _NUMPY:
        raise RefitError(f"tensor {name!r} has dtype {dtype}", expected="one of " + ", ".join(_NUMPY))
    return TensorInfo(name, _NUMPY[dtype], tuple(int(size) for size in array.shape))


def infos_of(tensors: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Name -> info, in the mapping's order."""
    return {name: info_of(name, array) for name, array in tensors.items()}


def flat_bytes(array: Any) -> Bytes:
    """The array's data in row-major order as uint8 [n_bytes], read-only.

    A view where the array is contiguous and on the CPU, a copy otherwise. 0-d and empty arrays are fine.

    Raises:
        RefitError: an object array, or bytes in the other byte order.
    """
    flat = _flat(array, copy=True)
    flat.flags.writeable = False
    return flat


def writable_bytes(array: Any) -> Bytes:
    """The array's own memory as uint8 [n_bytes]: a write to it changes the array.

    Raises:
        RefitError: not contiguous, read-only, or not in this machine's memory.
    """
    flat = _flat(array, copy=False)
    if not flat.flags.writeable:
        raise RefitError("the array is read-only", where=f"shape {tuple(array.shape)}", fix="give a writable copy")
    return flat


def _flat(array: Any, *, copy: bool) -> Bytes:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _flat_tensor(array, torch, copy=copy)
    array = np.asarray(array)
    if array.dtype.hasobject or array.dtype.byteorder == (">" if sys.byteorder == "little" else "<"):
        raise RefitError(f"an array of dtype {array.dtype.str} has no bytes to compare", expected="native numbers")
    if not array.flags.c_contiguous:
        if not copy:
            raise _strided(array)
        array = np.ascontiguousarray(array)
    flat: Bytes = array.reshape(-1).view(np.uint8)
    return flat


def _flat_tensor(tensor: Any, torch: Any, *, copy: bool) -> Bytes:
    tensor = tensor.detach()
    if not copy and (tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()):
        raise _strided(tensor)
    tensor = tensor.resolve_conj().resolve_neg().to("cpu").contiguous().reshape(-1)
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    flat: Bytes = tensor.view(torch.uint8).numpy()
    return flat


def _strided(array: Any) -> RefitError:
    return RefitError(
        "the array cannot be written in place",
        where=f"shape {tuple(array.shape)}",
        expected="contiguous memory on the CPU",
        fix="patch a contiguous copy and load it",
    )
