"""Payloads: layout, exact round trip, size by the formula, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ConfigError, NumericsError, ShapeError, SpecMismatchError
from halfbyte.formats import SPECS, get_spec, payload_codes, quantise, unpack_codes
from halfbyte.formats.residues import PayloadBits, pack_residues, residues, unpack_residues
from halfbyte.guidance import Payload, payload_bytes, payload_of, record
from halfbyte.kernels import active

BITS: tuple[PayloadBits, ...] = (4, 2, 1)


def test_residues_of_all_codes() -> None:
    """Signed index mod 4 and mod 2, written down; -0 counts as 0."""
    codes = torch.arange(16, dtype=torch.uint8)
    assert residues(codes, 4).tolist() == list(range(16))
    assert residues(codes, 2).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 3, 2, 1, 0, 3, 2, 1]
    assert residues(codes, 1).tolist() == [0, 1] * 8


def test_layout_first_value_lowest() -> None:
    assert pack_residues(torch.tensor([3, 0, 1, 2], dtype=torch.uint8), 2).tolist() == [0b10_01_00_11]
    assert pack_residues(torch.tensor([1, 0, 0, 0, 0, 0, 1, 0], dtype=torch.uint8), 1).tolist() == [0b0100_0001]
    assert pack_residues(torch.tensor([5, 12], dtype=torch.uint8), 4).tolist() == [0xC5]


@given(st.sampled_from(BITS), st.integers(0, 4), st.integers(0, 6), st.integers(0, 10_000))
def test_round_trip(bits: PayloadBits, rows: int, blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**bits, (rows, blocks * 8), generator=generator, dtype=torch.uint8)
    assert torch.equal(unpack_residues(pack_residues(values, bits), bits), values)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(SPECS)), st.sampled_from(BITS), st.integers(0, 3), st.integers(1, 4), st.integers(0, 10_000)
)
def test_recorded_payload_holds_the_codes(spec_name: str, bits: PayloadBits, rows: int, tiles: int, seed: int) -> None:
    spec = get_spec(spec_name)
    x = torch.randn(16 * rows, 32 * tiles, generator=torch.Generator().manual_seed(seed))
    q, p = record(x, spec, bits, active())
    by_definition = quantise(x, spec)
    assert torch.equal(q.codes, by_definition.codes)
    assert torch.equal(q.scales, p.scales)
    assert torch.equal(p.residues(), residues(unpack_codes(by_definition.codes), bits))
    assert torch.equal(payload_of(q, bits).codes, p.codes)
    assert torch.equal(active().payload(q, bits).codes, p.codes)
    assert p.check().nbytes == payload_bytes(p.shape, spec, bits)


def test_bytes_a_token_of_the_paper() -> None:
    """n * (b + .5) / 8 for NVFP4 and n * (b + .25) / 8 for MXFP4, and 4 bytes of a global scale where a token has one."""
    for bits in BITS:
        for n in (64, 2048, 8 * 768):
            assert payload_bytes((5, n), get_spec("halfbyte_token"), bits) == 5 * (n * (bits + 0.5) / 8 + 4)
            assert payload_bytes((5, n), get_spec("halfbyte_kv"), bits) == 5 * (n * (bits + 0.5) / 8) + 4
            assert payload_bytes((5, n), get_spec("mx_floor"), bits) == 5 * (n * (bits + 0.25) / 8) + 4


def test_four_bits_share_the_memory_of_the_codes() -> None:
    q = quantise(torch.randn(4, 32), get_spec("halfbyte_token"))
    p = payload_of(q, 4)
    assert p.codes.data_ptr() == q.codes.data_ptr()
    assert torch.equal(p.quantised().dequantise(), q.dequantise())
    with pytest.raises(NumericsError, match="2 bits"):
        payload_of(q, 2).quantised()


def test_select_and_concat() -> None:
    spec = get_spec("halfbyte_token")
    p = payload_of(quantise(torch.randn(7, 3, 32), spec), 2)
    rows = torch.tensor([5, 0, 6])
    picked = p.select(rows)
    assert picked.shape == (3, 3, 32)
    assert torch.equal(picked.residues(), p.residues()[rows])
    assert torch.equal(picked.global_scale, p.global_scale[rows])
    whole = Payload.concat([p.select(torch.arange(3)), p.select(torch.arange(3, 7))])
    for part in ("codes", "scales", "global_scale"):
        assert torch.equal(getattr(whole, part), getattr(p, part))
    constant = payload_of(quantise(torch.randn(7, 32), get_spec("halfbyte_kv")), 1)
    assert Payload.concat([constant, constant.select(rows)]).global_scale.shape == ()


def test_concat_refuses_other_rules() -> None:
    x = torch.randn(2, 32)
    p = payload_of(quantise(x, get_spec("halfbyte_token")), 2)
    others = [
        (payload_of(quantise(x, get_spec("halfbyte_token").replace(ties="away")), 2), "ties"),
        (payload_of(quantise(x, get_spec("halfbyte_token")), 1), "bits: 2 != 1"),
    ]
    for other, field in others:
        with pytest.raises(SpecMismatchError, match=field):
            Payload.concat([p, other])
    with pytest.raises(ShapeError, match="16"):
        Payload.concat([p, payload_of(quantise(x[:, :16], get_spec("halfbyte_token")), 2)])
    with pytest.raises(ShapeError):
        Payload.concat([])
    fixed = get_spec("halfbyte").replace(global_scale="tensor")
    with pytest.raises(SpecMismatchError, match="global_scale"):
        Payload.concat([payload_of(quantise(x, fixed), 2), payload_of(quantise(64 * x, fixed), 2)])


@pytest.mark.parametrize("bits", [0, 3, 8])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match=f"{bits} bits"):
        active().quantise_with_payload(torch.randn(1, 32), get_spec("halfbyte_token"), bits)  # type: ignore[arg-type]


def test_damaged_payloads_are_refused() -> None:
    p = payload_of(quantise(torch.randn(4, 32), get_spec("halfbyte_token")), 2)
    nan_scales = p.scales.clone()
    nan_scales[1, 1] = 0x7F
    damaged = [
        (Payload(p.codes[:, :-1], p.scales, p.global_scale, p.spec, p.bits, p.shape), ShapeError),
        (Payload(p.codes.to(torch.int16), p.scales, p.global_scale, p.spec, p.bits, p.shape), ShapeError),
        (Payload(p.codes, nan_scales, p.global_scale, p.spec, p.bits, p.shape), NumericsError),
        (Payload(p.codes, p.scales, -p.global_scale, p.spec, p.bits, p.shape), NumericsError),
        (Payload(p.codes, p.scales, p.global_scale[:3], p.spec, p.bits, p.shape), ShapeError),
    ]
    for payload, error in damaged:
        with pytest.raises(error):
            payload.check()


def test_codes_that_do_not_fill_bytes_are_refused() -> None:
    with pytest.raises(ShapeError, match="divisible by 4"):
        payload_codes(torch.zeros(3, 1, dtype=torch.uint8), 2)
