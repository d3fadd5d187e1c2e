"""Failures reported against exporters of FP4 checkpoints, by the name of the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fp4_models import DENSE, MIXTRAL, MOE, edit_tensors, save, weights

from halfbyte.errors import NumericsError, ShapeError
from halfbyte.formats import quantise
from halfbyte.models.architecture import Architecture, expert_names
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.fp4 import STYLES, StyleName
from halfbyte.models.safetensors_io import SafetensorsFile
from halfbyte.quantize.export import quantize_model

NAMES: list[StyleName] = ["compressed-tensors", "modelopt", "halfbyte"]


@pytest.mark.parametrize("style", NAMES)
@pytest.mark.parametrize("spec", ["halfbyte", None])
def test_modelopt_1397_all_zero_weights_stay_finite(tmp_path: Path, style: StyleName, spec: str | None) -> None:
    """Zero blocks, and a matrix that is all zero: also under the library rule that stores 0 as its global scale."""
    rule = spec or {"compressed-tensors": "compressed_tensors", "modelopt": "modelopt", "halfbyte": "modelopt"}[style]
    tensors = weights(DENSE)
    tensors["model.layers.0.mlp.down_proj.weight"].zero_()
    for part in "qkv":
        tensors[f"model.layers.1.self_attn.{part}_proj.weight"].zero_()
    tensors["model.layers.1.mlp.down_proj.weight"][:8].zero_()
    source = save(tmp_path / "model", DENSE, tensors)
    quantize_model(str(source), tmp_path / "fp4", style=style, kind="w4a4", spec_name=rule)
    after = load_checkpoint(tmp_path / "fp4")
    for name, q in after.codes.items():
        assert bool(q.dequantise().isfinite().all())
        assert bool((q.dequantise()[tensors[name] == 0] == 0).all())
    for tensor in SafetensorsFile(tmp_path / "fp4" / "model.safetensors").values():
        if tensor.dtype == torch.float32:
            assert bool((tensor.isfinite() & (tensor > 0)).all())


@pytest.mark.parametrize("style", NAMES)
@pytest.mark.parametrize("arch", [MOE, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_modelopt_1411_vllm_54973_gate_and_up_share_a_global_scale(
    tmp_path: Path, style: StyleName, arch: Architecture
) -> None:
    """The scale of the larger one, with the codes of the smaller one made anew under it."""
    tensors = weights(arch)
    for e in range(4):
        tensors[expert_names(arch, 1, e)[0]] *= 16
    source = save(tmp_path / "model", arch, tensors)
    quantize_model(str(source), tmp_path / "fp4", style=style, kind="w4a4")
    after = load_checkpoint(tmp_path / "fp4")
    for e in range(4):
        names = expert_names(arch, 1, e)
        gate, up = (after.codes[name] for name in names[:2])
        assert torch.equal(gate.global_scale, up.global_scale)
        alone = quantise(tensors[names[1]], after.codes[names[1]].spec)
        assert float(alone.global_scale) < float(up.global_scale)
        fused = quantise(torch.cat([tensors[name] for name in names[:2]]), up.spec)
        assert torch.equal(torch.cat([gate.codes, up.codes]), fused.codes)
        assert torch.equal(torch.cat([gate.scales, up.scales]), fused.scales)


def test_llama_cpp_21095_a_reciprocal_is_never_read_as_a_multiplier(tmp_path: Path) -> None:
    """The same weights in both conventions: the stored scales are reciprocals of each other, the values equal. Swapped, the
    values would be off by the square of the scale, so a file with the other convention's number is not the same weight."""
    source = save(tmp_path / "model", DENSE)
    for style in NAMES[:2]:
        quantize_model(str(source), tmp_path / style, style=style, kind="w4a4")
    ct, mo = (SafetensorsFile(tmp_path / style / "model.safetensors") for style in NAMES[:2])
    a, b = (load_checkpoint(tmp_path / style) for style in NAMES[:2])
    for name in a.codes:
        module = name.removesuffix(".weight")
        stored = float(ct[f"{module}.weight_global_scale"]), float(mo[f"{module}.weight_scale_2"])
        assert stored[0] * stored[1] == 1.0
        assert stored[1] < 1e-2
        assert torch.equal(a.codes[name].dequantise(), b.codes[name].dequantise())
        assert float(ct[f"{module}.input_global_scale"]) * float(mo[f"{module}.input_scale"]) == 1.0
    assert a.input_scales == b.input_scales


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_vllm_49949_a_split_that_fits_is_written(tmp_path: Path, ranks: int) -> None:
    arch = replace(DENSE, hidden_size=192, n_heads=12, n_kv_heads=12)
    source = save(tmp_path / "model", arch)
    quantize_model(str(source), tmp_path / "fp4", style="modelopt", kind="w4a4", tensor_parallel=ranks)
    codes = load_checkpoint(tmp_path / "fp4").codes
    assert codes["model.layers.0.mlp.down_proj.weight"].shape[1] % (16 * ranks) == 0


def test_vllm_49949_a_tensor_parallel_split_that_cuts_a_group_is_refused(tmp_path: Path) -> None:
    """down_proj has 96 inputs: 4 ranks would get 24 each, one and a half groups of 16."""
    source = save(tmp_path / "model", DENSE)
    with pytest.raises(ShapeError) as caught:
        quantize_model(str(source), tmp_path / "fp4", style="modelopt", kind="w4a4", tensor_parallel=4)
    assert "mlp.down_proj.weight" in str(caught.value)
    assert "96 columns / 4 = 24, blocks of 16" in str(caught.value)
    assert not (tmp_path / "fp4").exists()
    # MXFP4 groups are 32 wide: two ranks of 48 are too many already.
    with pytest.raises(ShapeError, match="96 columns / 2 = 48, blocks of 32"):
        quantize_model(
            str(source), tmp_path / "fp4", style="halfbyte", kind="w4a4", spec_name="mx_floor", tensor_parallel=2
        )
    # Experts alone: their own down projections decide.
    moe = save(tmp_path / "moe", MOE)
    with pytest.raises(ShapeError, match=r"experts\.0\.down_proj"):
        quantize_model(str(moe), tmp_path / "fp4", style="modelopt", kind="experts-only", tensor_parallel=4)


def test_torchao_3233_matrices_without_whole_blocks_stay_and_are_listed(tmp_path: Path) -> None:
    """An MLP of width 72: its down projection has 4.5 blocks of inputs and keeps its bits; the rest is quantised."""
    arch = replace(DENSE, intermediate_size=72)
    source = save(tmp_path / "model", arch)
    report = quantize_model(str(source), tmp_path / "fp4", style="compressed-tensors", kind="w4a4")
    misfits = {f"model.layers.{i}.mlp.down_proj" for i in range(2)}
    assert set(report.plan.misfits) == misfits
    assert misfits < set(report.plan.left)
    assert [note for note in report.notes if "no multiple of 16" in note]
    after = load_checkpoint(tmp_path / "fp4")
    assert after.quantisation is not None
    assert misfits < set(after.quantisation.ignored)
    for module in misfits:
        assert torch.equal(after.tensors[f"{module}.weight"], weights(arch)[f"{module}.weight"])
        assert f"{module}.weight" not in after.codes
    # Both matrices of an expert stay where one does not fit: they are one kernel.
    odd = replace(MOE, moe_intermediate_size=24)
    quantize_model(str(save(tmp_path / "odd", odd)), tmp_path / "odd4", style="modelopt", kind="w4a4")
    assert [name for name in load_checkpoint(tmp_path / "odd4").codes if ".experts." in name] == []


def test_stacked_experts_are_split_one_by_one(tmp_path: Path) -> None:
    """A source whose experts are stacked as transformers 5 holds them: gate rows, then up rows."""
    tensors = weights(MOE)
    source = save(tmp_path / "model", MOE, tensors)

    def stack(held: dict[str, torch.Tensor]) -> None:
        parts = [[held.pop(n) for n in expert_names(MOE, 1, e)] for e in range(4)]
        prefix = "model.layers.1.mlp.experts"
        held[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(p[:2]) for p in parts])
        held[f"{prefix}.down_proj"] = torch.stack([p[2] for p in parts])

    edit_tensors(source, stack)
    quantize_model(str(source), tmp_path / "fp4", style="modelopt", kind="w4a4")
    after = load_checkpoint(tmp_path / "fp4")
    for e in range(4):
        gate, up, _ = expert_names(MOE, 1, e)
        fused = quantise(torch.cat([tensors[gate], tensors[up]]), after.codes[gate].spec)
        assert torch.equal(torch.cat([after.codes[gate].codes, after.codes[up].codes]), fused.codes)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_stops_the_export(tmp_path: Path, value: float) -> None:
    source = save(tmp_path / "model", DENSE)
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(source, lambda t: t[name].view(-1)[:1].fill_(value))
    with pytest.raises(NumericsError, match="up_proj"):
        quantize_model(str(source), tmp_path / "fp4", style="modelopt", kind="w4a4")
    assert not (tmp_path / "fp4").exists()


def test_every_style_names_its_parts_differently() -> None:
    """No file of one style can pass for another's."""
    assert len({style.scales + style.global_scale for style in STYLES.values()}) == 3
