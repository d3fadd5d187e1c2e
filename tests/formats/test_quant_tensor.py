"""QuantTensor: sizes, storage, checks, slices, 2-D scales."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from halfbyte.errors import CheckpointError, ConfigError, NumericsError, ShapeError, SpecMismatchError
from halfbyte.formats import (
    SPECS,
    QuantTensor,
    concat_rows,
    get_spec,
    mantissa_bits,
    quantise,
    slice_columns,
    slice_rows,
    unpack_bits,
    unpack_codes,
)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_nbytes() -> None:
    assert quantise(noise(8, 64), get_spec("halfbyte")).nbytes == 8 * (32 + 4) + 4
    assert quantise(noise(8, 64), get_spec("halfbyte_token")).nbytes == 8 * (32 + 4 + 4)
    assert quantise(noise(8, 64), get_spec("mx_floor")).nbytes == 8 * (32 + 2) + 4


@pytest.mark.parametrize("name", sorted(SPECS))
def test_safetensors_round_trip(name: str, tmp_path: Path) -> None:
    q = quantise(noise(2, 16, 64), get_spec(name))
    tensors, metadata = q.to_tensors("layers.0.up_proj.weight")
    save_file(tensors, tmp_path / "q.safetensors", metadata)
    with safe_open(tmp_path / "q.safetensors", "pt") as file:
        loaded = QuantTensor.from_tensors(
            "layers.0.up_proj.weight",
            {key: file.get_tensor(key) for key in tensors},
            file.metadata(),
        )
    assert loaded.spec == q.spec
    assert loaded.shape == q.shape
    for part in ("codes", "scales", "global_scale"):
        assert torch.equal(getattr(loaded, part), getattr(q, part))
    assert torch.equal(loaded.dequantise(), q.dequantise())


def test_incomplete_or_damaged_storage_is_refused() -> None:
    tensors, metadata = quantise(noise(4, 32), get_spec("halfbyte")).to_tensors("w")
    with pytest.raises(CheckpointError, match=r"w\.scales"):
        QuantTensor.from_tensors("w", {k: v for k, v in tensors.items() if k != "w.scales"}, metadata)
    with pytest.raises(CheckpointError, match="metadata"):
        QuantTensor.from_tensors("w", tensors, {})
    for text in ("{", '{"shape": [4, 32]}', '{"spec": {}, "shape": null}'):
        with pytest.raises(CheckpointError, match="cannot be read"):
            QuantTensor.from_tensors("w", tensors, {"w": text})
    with pytest.raises(ConfigError, match="missing"):
        QuantTensor.from_tensors("w", tensors, {"w": '{"spec": {}, "shape": [4, 32]}'})
    with pytest.raises(NumericsError, match="sign bit"):
        QuantTensor.from_tensors("w", {**tensors, "w.scales": tensors["w.scales"] | 0x80}, metadata)


def test_check_refuses_parts_that_do_not_fit() -> None:
    q = quantise(noise(4, 32), get_spec("halfbyte_token"))
    bad_shapes: list[dict[str, object]] = [
        {"codes": q.codes[:, :8]}, {"scales": q.scales[:2]}, {"global_scale": torch.ones(3)},
        {"shape": (4, 24)}, {"shape": ()}, {"shape": (8, 16)},
    ]  # fmt: skip
    for change in bad_shapes:
        with pytest.raises(ShapeError):
            dataclasses.replace(q, **change).check()  # type: ignore[arg-type]
    bad_numbers: list[dict[str, object]] = [
        {"codes": q.codes.to(torch.int8)}, {"scales": q.scales.float()}, {"global_scale": q.global_scale.double()},
        {"global_scale": -q.global_scale}, {"global_scale": q.global_scale * float("inf")},
        {"global_scale": q.global_scale * float("nan")}, {"global_scale": torch.tensor(0.0)},
        {"global_scale": torch.tensor(2.0**120)},
        {"global_scale": torch.tensor(1e-45), "spec": get_spec("compressed_tensors")},
    ]  # fmt: skip
    for change in bad_numbers:
        with pytest.raises(NumericsError, match="tensor"):
            dataclasses.replace(q, **change).check()  # type: ignore[arg-type]
    mx = quantise(noise(4, 32), get_spec("mx_floor"))
    with pytest.raises(NumericsError, match="MXFP4"):
        dataclasses.replace(mx, global_scale=torch.tensor(2.0)).check()


def test_a_zero_global_scale_is_allowed_only_for_zeros() -> None:
    q = quantise(torch.zeros(2, 16), get_spec("torchao"))
    assert float(q.global_scale) == 0.0
    q.check()
    rows = quantise(noise(2, 16) * torch.tensor([[0.0], [1.0]]), get_spec("torchao").replace(global_scale="token"))
    assert rows.global_scale[0] == 0
    rows.check()


def test_mantissa_bits() -> None:
    q = quantise(noise(4, 64), get_spec("halfbyte"))
    bits = mantissa_bits(q)
    assert bits.shape == (4, 8)
    assert torch.equal(unpack_bits(bits), unpack_codes(q.codes) & 1)


def test_column_slices() -> None:
    q = quantise(noise(4, 64), get_spec("halfbyte_token"))
    part = slice_columns(q, 16, 48).check()
    assert torch.equal(part.dequantise(), q.dequantise()[:, 16:48])
    for start, stop in ((8, 16), (0, 24), (48, 16), (-16, 16), (0, 80)):
        with pytest.raises(ShapeError, match="64 columns, blocks of 16"):
            slice_columns(q, start, stop)


def test_rows_can_be_cut_and_stacked_again() -> None:
    for name in ("halfbyte", "halfbyte_token", "mx_rceil"):
        q = quantise(noise(8, 64), get_spec(name))
        parts = [slice_rows(q, 0, 3).check(), slice_rows(q, 3, 8).check()]
        whole = concat_rows(parts).check()
        assert torch.equal(whole.global_scale, q.global_scale)
        assert torch.equal(whole.dequantise(), q.dequantise())
    with pytest.raises(ShapeError, match="rows 3"):
        slice_rows(q, 3, 9)


def test_stacking_keeps_each_global_scale() -> None:
    a, b = quantise(noise(3, 32), get_spec("halfbyte")), quantise(noise(5, 32) * 100, get_spec("halfbyte"))
    whole = concat_rows([a, b], name="qkv").check()
    assert whole.global_scale.shape == (8,)
    assert torch.equal(whole.dequantise(), torch.cat([a.dequantise(), b.dequantise()]))
    with pytest.raises(SpecMismatchError, match="format"):
        concat_rows([a, quantise(noise(3, 32), get_spec("mx_floor"))])
    with pytest.raises(ShapeError, match="cannot be stacked"):
        concat_rows([a, quantise(noise(3, 64), get_spec("halfbyte"))])


def test_a_global_scale_for_each_row() -> None:
    x, g = noise(4, 32), torch.tensor([0.001, 0.002, 0.5, 0.25])
    q = quantise(x, get_spec("halfbyte"), global_scale=g)
    for i in range(4):
        alone = quantise(x[i : i + 1], get_spec("halfbyte"), global_scale=g[i])
        assert torch.equal(q.codes[i], alone.codes[0])
        assert torch.equal(q.dequantise()[i], alone.dequantise()[0])
    with pytest.raises(ShapeError, match=r"global scale \(3,\)"):
        quantise(x, get_spec("halfbyte"), global_scale=g[:3])
    with pytest.raises(ShapeError, match="share block scales"):
        quantise(noise(16, 32), get_spec("halfbyte_2d"), global_scale=torch.ones(16))


def test_2d_scales_are_shared_by_16_rows_and_survive_a_transpose() -> None:
    """With 16x16 tiles the weight and its transpose have the same values (arXiv 2509.25149): the reason they exist."""
    x = noise(48, 64)
    spec = get_spec("halfbyte_2d")
    q = quantise(x, spec).check()
    tiles = q.scales.reshape(3, 16, 4)
    assert bool((tiles == tiles[:, :1]).all())
    assert torch.equal(quantise(x.T.contiguous(), spec).dequantise().T, q.dequantise())
    flat = quantise(x, get_spec("halfbyte"))
    assert not torch.equal(flat.dequantise(), quantise(x.T.contiguous(), get_spec("halfbyte")).dequantise().T)
    # The rule itself: each tile, laid out as one long block, has the scale of its own maximum.
    amax = x.reshape(3, 16, 4, 16).abs().amax((1, 3))
    target = (amax / 6 / q.global_scale).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(tiles[:, 0], target)


def test_2d_scales_refuse_partial_tiles() -> None:
    with pytest.raises(ShapeError, match="divisible by 16"):
        quantise(noise(24, 32), get_spec("halfbyte_2d"))
    q = quantise(noise(32, 32), get_spec("halfbyte_2d"))
    with pytest.raises(ShapeError, match="multiples of 16"):
        slice_rows(q, 0, 8)
    slice_rows(q, 16, 32).check()
    q.scales[3, 0] = 1
    with pytest.raises(NumericsError, match="different scales"):
        q.check()


def test_four_over_six_never_raises_the_error_of_a_block() -> None:
    x = noise(64, 256)
    with_choice = get_spec("fouroversix_mse")
    chosen = quantise(x, with_choice)
    plain = quantise(x, with_choice.replace(four_over_six="none"))
    errors = [(q.dequantise() - x).double().square().reshape(-1, 16).sum(-1) for q in (chosen, plain)]
    assert bool((errors[0] <= errors[1] * (1 + 1e-5)).all())  # the choice is made in fp32
    share = float((chosen.scales != plain.scales).float().mean())
    assert 0.2 < share < 0.8
    assert float(errors[0].sum()) < 0.9 * float(errors[1].sum())
