"""The files as others read them: compressed-tensors, ModelOpt, transformers. Skipped where they are missing.

compressed-tensors 0.20.1, nvidia-modelopt 0.47.0, transformers 5.24.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fp4_models import DENSE, MODELS, MOE, save

from halfbyte.formats import decode_e4m3, decode_e8m0, decode_packed
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.safetensors_io import SafetensorsFile
from halfbyte.quantize.export import quantize_model
from halfbyte.quantize.plan import Kind


def written(tmp_path: Path, model: str, **settings: Any) -> tuple[Path, dict[str, Any], SafetensorsFile]:
    source = save(tmp_path / "model", MODELS[model])
    folder = tmp_path / "fp4"
    quantize_model(str(source), folder, **settings)
    return folder, json.loads((folder / "config.json").read_text()), SafetensorsFile(folder / "model.safetensors")


def test_names_shapes_and_dtypes_of_compressed_tensors(tmp_path: Path) -> None:
    """What vLLM's CompressedTensorsW4A4Fp4 registers: U8 [N, K/2], E4M3 [N, K/16], two FP32 of one element."""
    _, config, tensors = written(tmp_path, "moe", style="compressed-tensors", kind="w4a4")
    module = "model.layers.1.mlp.experts.3.down_proj"
    own = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items() if name.startswith(f"{module}.")}
    assert own == {
        f"{module}.weight_packed": (torch.uint8, (64, 16)),
        f"{module}.weight_scale": (torch.float8_e4m3fn, (64, 2)),
        f"{module}.weight_global_scale": (torch.float32, (1,)),
        f"{module}.input_global_scale": (torch.float32, (1,)),
    }
    assert tensors[f"{module}.input_global_scale"].item() == 8.0  # a divisor: 2688 / 336
    stated = config["quantization_config"]
    assert stated["format"] == "nvfp4-pack-quantized"
    assert set(stated["ignore"]) == {"lm_head", "model.layers.1.mlp.gate"}
    assert stated["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"


def test_names_shapes_and_dtypes_of_modelopt(tmp_path: Path) -> None:
    """What vLLM's ModelOptNvFp4LinearMethod registers; its config parser wants three keys in hf_quant_config.json."""
    folder, config, tensors = written(tmp_path, "dense", style="modelopt", kind="w4a4")
    module = "model.layers.0.mlp.up_proj"
    own = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items() if name.startswith(f"{module}.")}
    assert own == {
        f"{module}.weight": (torch.uint8, (96, 32)),
        f"{module}.weight_scale": (torch.float8_e4m3fn, (96, 4)),
        f"{module}.weight_scale_2": (torch.float32, ()),
        f"{module}.input_scale": (torch.float32, ()),
    }
    assert tensors[f"{module}.input_scale"].item() == 0.125
    legacy = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert {"group_size", "kv_cache_quant_algo", "exclude_modules"} <= legacy.keys()
    assert legacy["quant_algo"] == config["quantization_config"]["quant_algo"] == "NVFP4"
    assert legacy["exclude_modules"] == config["quantization_config"]["ignore"] == ["lm_head"]


def test_weights_alone_have_no_input_scales(tmp_path: Path) -> None:
    for style, algorithm in (("modelopt", "W4A16_NVFP4"), ("compressed-tensors", None)):
        (tmp_path / style).mkdir()
        _, config, tensors = written(tmp_path / style, "dense", style=style, kind="w4a16")
        assert [name for name in tensors if name.endswith(("input_scale", "input_global_scale"))] == []
        stated = config["quantization_config"]
        assert stated.get("quant_algo") == algorithm
        assert stated["config_groups"]["group_0"].get("input_activations") is None


def test_experts_alone_leave_every_other_module_by_name(tmp_path: Path) -> None:
    _, config, _ = written(tmp_path, "moe", style="compressed-tensors", kind="experts-only")
    ignored = set(config["quantization_config"]["ignore"])
    attention = {f"model.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in "qkvo"}
    dense = {f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")}
    assert ignored == attention | dense | {"model.layers.1.mlp.gate", "lm_head"}


@pytest.mark.parametrize("spec", ["halfbyte", "mx_floor", "mx_rceil"])
@pytest.mark.parametrize("kind", ["w4a4", "w4a16"])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_compressed_tensors_unpacks_the_same_bits(tmp_path: Path, model: str, kind: Kind, spec: str) -> None:
    pytest.importorskip("compressed_tensors", minversion="0.13")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    folder, config, tensors = written(tmp_path, model, style="compressed-tensors", kind=kind, spec_name=spec)
    stated = config["quantization_config"]
    parsed = QuantizationConfig.model_validate(stated)  # unknown fields of a scheme are errors there
    scheme = parsed.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(stated["format"])
    # The layout is the library's own: the scheme says which compressor it would have chosen, with which parameters.
    assert compressor.can_compress(torch.nn.Linear, scheme)
    checkpoint = load_checkpoint(folder)
    assert len(checkpoint.codes) > 10
    for name, q in checkpoint.codes.items():
        prefix = name.removesuffix("weight")
        state = {part.removeprefix(prefix): t for part, t in tensors.items() if part.startswith(prefix)}
        expected = {"weight_packed", "weight_scale"}
        expected |= {"weight_global_scale"} if spec == "halfbyte" else set()
        expected |= {"input_global_scale"} if spec == "halfbyte" and kind == "w4a4" else set()
        assert state.keys() == expected
        weight = compressor.decompress(state, scheme)["weight"]
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight.float(), q.dequantise())


def test_compressed_tensors_presets_are_ours(tmp_path: Path) -> None:
    """The arguments in config.json are those of the library's own presets NVFP4, NVFP4A16, MXFP4 and MXFP4A16."""
    pytest.importorskip("compressed_tensors", minversion="0.13")
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    cases = {"NVFP4": ("w4a4", "halfbyte"), "NVFP4A16": ("w4a16", "halfbyte"), "MXFP4": ("w4a4", "mx_floor")}
    for preset, (kind, spec) in {**cases, "MXFP4A16": ("w4a16", "mx_floor")}.items():
        (tmp_path / preset).mkdir()
        _, config, _ = written(tmp_path / preset, "dense", style="compressed-tensors", kind=kind, spec_name=spec)
        ours = QuantizationConfig.model_validate(config["quantization_config"]).config_groups["group_0"]
        theirs = preset_name_to_scheme(preset, ["Linear"])
        skip = {"zp_dtype", "observer"}
        for part in ("weights", "input_activations"):
            a, b = getattr(ours, part), getattr(theirs, part)
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.model_dump(exclude=skip) == b.model_dump(exclude=skip), (preset, part)


def test_transformers_loads_compressed_tensors_to_the_same_logits(tmp_path: Path) -> None:
    """from_pretrained of the FP4 folder against a plain model with the dequantised weights."""
    pytest.importorskip("compressed_tensors", minversion="0.13")
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    from halfbyte.models.checkpoint_writer import save_checkpoint

    folder, _, _ = written(tmp_path, "dense", style="compressed-tensors", kind="w4a16")
    plain = save_checkpoint(tmp_path / "plain", DENSE, dict(load_checkpoint(folder).tensors))
    ids = torch.tensor([[3, 5, 7, 11, 13]])
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(ids).logits
        expected = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)(ids).logits
    assert torch.equal(found, expected)


def test_modelopt_unpacks_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("modelopt")
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    folder, _, tensors = written(tmp_path, "moe", style="modelopt", kind="w4a4")
    for name, q in load_checkpoint(folder).codes.items():
        module = name.removesuffix(".weight")
        held = NVFP4QTensor(torch.Size(q.shape), torch.bfloat16, tensors[name])
        weight = held.dequantize(
            dtype=torch.float32,
            scale=tensors[f"{module}.weight_scale"],
            double_scale=tensors[f"{module}.weight_scale_2"],
            block_sizes={-1: 16},
        )
        assert torch.equal(weight, q.dequantise())


@pytest.mark.parametrize("spec", ["halfbyte", "mx_even"])
def test_the_bytes_mean_what_the_formats_say(tmp_path: Path, spec: str) -> None:
    """Without any library: value = grid[code] * scale / global (compressed-tensors), from the stored tensors alone."""
    folder, _, tensors = written(tmp_path, "moe", style="compressed-tensors", kind="w4a4", spec_name=spec)
    after = load_checkpoint(folder)
    for name in after.codes:
        module = name.removesuffix(".weight")
        grid = decode_packed(tensors[f"{module}.weight_packed"])
        stored = tensors[f"{module}.weight_scale"].view(torch.uint8)
        scale = decode_e4m3(stored) if spec == "halfbyte" else decode_e8m0(stored)
        divisor = tensors[f"{module}.weight_global_scale"] if spec == "halfbyte" else torch.ones(1)
        values = grid.view(*scale.shape, -1) * (scale / divisor).unsqueeze(-1)
        assert torch.equal(values.view(grid.shape), after.tensors[name].float())


def test_our_own_style_is_the_engines_coordinates(tmp_path: Path) -> None:
    """The names and bytes of an FP4 refit (rollout/fp4_target), so that a folder and a refit agree."""
    from halfbyte.kernels import active
    from halfbyte.models.precision import precision_from
    from halfbyte.rollout.fp4_target import fp4_coordinates

    source = save(tmp_path / "model", MOE)
    quantize_model(str(source), tmp_path / "fp4", style="halfbyte", kind="w4a4")
    held = SafetensorsFile(tmp_path / "fp4" / "model.safetensors")
    expected = fp4_coordinates(MOE, precision_from("w4a4kv4"), load_checkpoint(source).tensors, active())
    assert set(held) == set(expected)
    for name, tensor in expected.items():
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (held[name], tensor)]
        assert torch.equal(*bits), name


def test_nothing_of_the_libraries_is_needed(tmp_path: Path) -> None:
    before = set(sys.modules)
    written(tmp_path, "dense", style="modelopt", kind="w4a4")
    assert not {"compressed_tensors", "modelopt", "transformers"} & (set(sys.modules) - before)
