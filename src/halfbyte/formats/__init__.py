"""4-bit formats."""

from halfbyte.formats.grid import (
    E2M1_GRID,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
)
from halfbyte.formats.packing import pack_codes, unpack_codes
from halfbyte.formats.quantise import quantise
from halfbyte.formats.spec import QuantSpec, first_difference
from halfbyte.formats.specs import SPECS, get_spec
from halfbyte.formats.tensor import QuantTensor, dequantise

__all__ = [
    "E2M1_GRID",
    "SPECS",
    "QuantSpec",
    "QuantTensor",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e8m0",
    "dequantise",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e8m0",
    "first_difference",
    "get_spec",
    "pack_codes",
    "quantise",
    "unpack_codes",
]
