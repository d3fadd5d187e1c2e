"""4-bit formats: what the bits mean, every choice on the way to them (``QuantSpec``), and the reference quantiser."""

from halfbyte.formats.bits import mantissa_bits, pack_bits, unpack_bits
from halfbyte.formats.global_scale import multiplier_pair, power_of_two_at_least, to_convention
from halfbyte.formats.grid import (
    E2M1_GRID,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    decode_packed,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
)
from halfbyte.formats.packing import pack_codes, unpack_codes
from halfbyte.formats.payload import Payload, payload_bytes, payload_codes, payload_of
from halfbyte.formats.quantise import fits, quantise
from halfbyte.formats.residues import PayloadBits, residues, signed_index
from halfbyte.formats.shared import fill_uncalibrated, quantise_shared, shared_global
from halfbyte.formats.spec import QuantSpec, first_difference
from halfbyte.formats.specs import SPECS, get_spec
from halfbyte.formats.split import concat_rows, slice_columns, slice_rows, split_columns
from halfbyte.formats.stable_scale import ScaleUpdate, StableScales
from halfbyte.formats.stochastic import quantise_stochastic
from halfbyte.formats.tensor import QuantTensor, dequantise, validate

__all__ = [
    "E2M1_GRID",
    "SPECS",
    "Payload",
    "PayloadBits",
    "QuantSpec",
    "QuantTensor",
    "ScaleUpdate",
    "StableScales",
    "concat_rows",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e8m0",
    "decode_packed",
    "dequantise",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e8m0",
    "fill_uncalibrated",
    "first_difference",
    "fits",
    "get_spec",
    "mantissa_bits",
    "multiplier_pair",
    "pack_bits",
    "pack_codes",
    "payload_bytes",
    "payload_codes",
    "payload_of",
    "power_of_two_at_least",
    "quantise",
    "quantise_shared",
    "quantise_stochastic",
    "residues",
    "shared_global",
    "signed_index",
    "slice_columns",
    "slice_rows",
    "split_columns",
    "to_convention",
    "unpack_bits",
    "unpack_codes",
    "validate",
]
