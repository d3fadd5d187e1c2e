"""FP4 folders are files from strangers: every part is checked before a code is used, and nothing is guessed."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fp4_models import DENSE, MOE, TIED, edit_json, edit_tensors, save, weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfbyte.errors import CheckpointError, NumericsError, UserError
from halfbyte.formats import get_spec
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.fp4 import read_quantisation
from halfbyte.quantize.export import quantize_model

Q = "model.layers.0.self_attn.q_proj"
STYLES = ("compressed-tensors", "modelopt", "halfbyte")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One FP4 folder of each style, never edited."""
    root = tmp_path_factory.mktemp("fp4")
    source = str(save(root / "model", DENSE))
    for style in STYLES:
        quantize_model(source, root / style, style=style, kind="w4a4")  # type: ignore[arg-type]
    quantize_model(source, root / "mxfp4", style="compressed-tensors", kind="w4a4", spec_name="mx_floor")
    quantize_model(str(save(root / "experts", MOE)), root / "moe", style="modelopt", kind="w4a4")
    return {name: root / name for name in (*STYLES, "mxfp4", "moe")}


@pytest.fixture(scope="module")
def side_files(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Style -> file name -> its content, None where the style has no such file."""
    names = ("config.json", "hf_quant_config.json", "fp4_spec.json")
    return {
        style: {
            n: json.loads((folders[style] / n).read_text()) if (folders[style] / n).exists() else None for n in names
        }
        for style in STYLES
    }


def copied(folders: dict[str, Path], name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders[name], tmp_path / "copy"))


def refused(folder: Path, error: type[UserError], *words: str) -> None:
    with pytest.raises(error) as caught:
        load_checkpoint(folder)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def set_byte(name: str, byte: int) -> Any:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(torch.uint8).view(-1)[3] = byte

    return change


SCALES = {"compressed-tensors": f"{Q}.weight_scale", "modelopt": f"{Q}.weight_scale", "halfbyte": f"{Q}.weight.scales"}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("byte", "words"), [(0x80, "sign bit"), (0xC5, "sign bit"), (0x7F, "NaN"), (0xFF, "sign bit")])
def test_nvfp4_scales_with_the_sign_bit_or_nan_are_rejected_on_load(
    folders: dict[str, Path], tmp_path: Path, style: str, byte: int, words: str
) -> None:
    folder = edit_tensors(copied(folders, style, tmp_path), set_byte(SCALES[style], byte))
    refused(folder, NumericsError, words, f"{Q}.weight", "first at (0, 3)")
    # Also where the reading of all weights is put off: no access hands them out.
    lazy = load_checkpoint(folder, finite=False)
    for read in (lazy.codes, lazy.tensors):
        with pytest.raises(NumericsError, match=words):
            read[f"{Q}.weight"]


def test_nan_scales_of_mxfp4_are_rejected(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = edit_tensors(copied(folders, "mxfp4", tmp_path), set_byte(f"{Q}.weight_scale", 0xFF))
    refused(folder, NumericsError, "NaN block scales", f"{Q}.weight")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 3.0])
@pytest.mark.parametrize(
    ("style", "part"), [("compressed-tensors", "weight_global_scale"), ("modelopt", "weight_scale_2")]
)
def test_unusable_global_scales_are_rejected(
    folders: dict[str, Path], tmp_path: Path, style: str, part: str, value: float
) -> None:
    """3.0: our rule has powers of two only, so file and rule do not belong together."""
    folder = edit_tensors(copied(folders, style, tmp_path), lambda t: t[f"{Q}.{part}"].fill_(value))
    refused(folder, NumericsError, f"{Q}.weight", "global scale")


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -2.0])
@pytest.mark.parametrize(("style", "part"), [("compressed-tensors", "input_global_scale"), ("modelopt", "input_scale")])
def test_compressed_tensors_595_input_scales_of_zero_or_infinity_are_rejected(
    folders: dict[str, Path], tmp_path: Path, style: str, part: str, value: float
) -> None:
    folder = edit_tensors(copied(folders, style, tmp_path), lambda t: t[f"{Q}.{part}"].fill_(value))
    refused(folder, NumericsError, f"{Q}.{part}", "calibrate again")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("compressed-tensors", lambda t: t.pop(f"{Q}.weight_scale"), [f"{Q}.weight_scale is missing"]),
        ("compressed-tensors", lambda t: t.pop(f"{Q}.weight_global_scale"), [f"{Q}.weight_global_scale is missing"]),
        ("compressed-tensors", lambda t: t.pop(f"{Q}.weight_packed"), ["missing: 1", f"{Q}.weight"]),
        ("modelopt", lambda t: t.pop(f"{Q}.weight_scale_2"), [f"{Q}.weight_scale_2 is missing"]),
        ("halfbyte", lambda t: t.pop(f"{Q}.weight.scales"), [f"{Q}.weight.scales is missing"]),
        ("modelopt", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:, :-8].clone()}), ["[64, 24]", "[64, 32]"]),
        ("modelopt", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].view(torch.int8)}), ["int8", "uint8"]),
        (
            "compressed-tensors",
            lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"].view(torch.float8_e5m2)}),
            ["float8_e5m2", "float8_e4m3fn"],
        ),
        (
            "compressed-tensors",
            lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"].float()}),
            ["float32", "float8_e4m3fn"],
        ),
        (
            "compressed-tensors",
            lambda t: t.update({f"{Q}.weight_global_scale": torch.ones(64)}),
            [f"{Q}.weight_global_scale", "[64]"],
        ),
        (
            "modelopt",
            lambda t: t.update({f"{Q}.pre_quant_scale": torch.ones(64)}),
            ["unexpected: 1", "pre_quant_scale"],
        ),
        ("compressed-tensors", lambda t: t.update({f"{Q}.weight_zero_point": torch.ones(1)}), ["unexpected: 1"]),
        ("mxfp4", lambda t: t.update({f"{Q}.weight_global_scale": torch.ones(1)}), ["MXFP4 has no global scale"]),
        (
            "modelopt",
            lambda t: t.update({"model.embed_tokens.weight": torch.zeros(32, 32, dtype=torch.uint8)}),
            ["model.embed_tokens.weight is quantised", "no FP4 embed"],
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    folders: dict[str, Path], tmp_path: Path, name: str, change: Any, words: list[str]
) -> None:
    refused(edit_tensors(copied(folders, name, tmp_path), change), CheckpointError, *words)


def test_codes_without_a_config_that_says_so_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders, "modelopt", tmp_path)
    edit_json(folder / "config.json", lambda c: c.pop("quantization_config"))
    (folder / "fp4_spec.json").unlink()
    assert load_checkpoint(folder).quantisation is not None  # hf_quant_config.json still says it
    (folder / "hf_quant_config.json").unlink()
    refused(folder, CheckpointError, "unexpected", "mis-shaped")


def test_a_config_without_codes_is_refused(tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = save(tmp_path / "plain", DENSE)
    stated = json.loads((folders["compressed-tensors"] / "config.json").read_text())["quantization_config"]
    edit_json(folder / "config.json", lambda c: c.update(quantization_config=stated))
    refused(folder, CheckpointError, "no file holds any codes", "MODULE.weight_packed")


CT = ("quantization_config", "config_groups", "group_0")


def at(*path: str, **values: Any) -> Any:
    def change(config: dict[str, Any]) -> None:
        for key in path:
            config = config[key]
        config.update(values)

    return change


@pytest.mark.parametrize(
    ("style", "change", "words"),
    [
        ("compressed-tensors", at("quantization_config", quant_method="fp8"), ["already quantised (fp8)"]),
        ("compressed-tensors", at("quantization_config", quant_method="mxfp4"), ["already quantised (mxfp4)"]),
        ("compressed-tensors", at("quantization_config", format="pack-quantized"), ["format 'pack-quantized'"]),
        ("compressed-tensors", at("quantization_config", format="mxfp4-pack-quantized"), ["groups of 16"]),
        (
            "compressed-tensors",
            at("quantization_config", transform_config={"config_groups": {"a": 1}}),
            ["transform_config"],
        ),
        ("compressed-tensors", at("quantization_config", sparsity_config={"format": "sparse-24"}), ["sparsity_config"]),
        ("compressed-tensors", at(*CT, "weights", num_bits=8), ["config group 'group_0'"]),
        ("compressed-tensors", at(*CT, "weights", symmetric=False), ["config group 'group_0'"]),
        ("compressed-tensors", at(*CT, "weights", group_size=64), ["config group 'group_0'"]),
        ("compressed-tensors", at(*CT, "weights", group_size=32), ["format 'nvfp4-pack-quantized' with groups of 32"]),
        ("compressed-tensors", at("quantization_config", config_groups={}), ["0 schemes"]),
        ("compressed-tensors", at("quantization_config", config_groups={"a": 5}), ["config group 'a'"]),
        ("compressed-tensors", at("quantization_config", ignore="lm_head"), ["ignore", "list of strings"]),
        ("modelopt", at("quantization_config", quant_algo="NVFP4_AWQ"), ["NVFP4_AWQ"]),
        ("modelopt", at("quantization_config", quant_algo="FP8"), ["FP8"]),
        ("modelopt", at("quantization_config", quant_algo=["NVFP4"]), ["NVFP4"]),
        ("modelopt", at("quantization_config", group_size=32), ["group_size 32"]),
        ("modelopt", at("quantization_config", quant_algo="W4A16_NVFP4"), ["disagree"]),
    ],
)
def test_schemes_we_do_not_read_are_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, style: str, change: Any, words: list[str]
) -> None:
    folder = copied(folders, style, tmp_path)
    edit_json(folder / "config.json", change)
    refused(folder, CheckpointError, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(format_version=2), ["format_version 2"]),
        (lambda r: r.pop("spec"), ["cannot be read"]),
        (lambda r: r["spec"].pop("ties"), ["cannot be read", "ties"]),
        (lambda r: r["spec"].update(ties="up"), ["cannot be read", "ties"]),
        (lambda r: r["spec"].update(constant="1"), ["cannot be read"]),
        (lambda r: r["spec"].update(scale_floor=None), ["cannot be read"]),
        (lambda r: r.update(spec=get_spec("mx_floor").to_json()), ["disagree", "blocks of 16"]),
        (lambda r: r.update(format="modelopt"), ["disagree"]),
        (lambda r: r.update(quantised_inputs="yes"), ["how inputs are scaled"]),
        (lambda r: r.update(input_scales=7), ["how inputs are scaled"]),
    ],
)
def test_a_wrong_record_is_refused(folders: dict[str, Path], tmp_path: Path, change: Any, words: list[str]) -> None:
    folder = copied(folders, "compressed-tensors", tmp_path)
    edit_json(folder / "fp4_spec.json", change)
    refused(folder, CheckpointError, *words)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_value_of_a_config_is_more_than_a_user_error(side_files: dict[str, Any], data: st.DataObject) -> None:
    """Any key of any of the three files replaced by any JSON."""
    files = copy.deepcopy(side_files[data.draw(st.sampled_from(STYLES))])
    chosen = data.draw(st.sampled_from([name for name, value in files.items() if value]))
    place: Any = files[chosen]
    path = ["quantization_config"] if chosen == "config.json" else []
    for key in path:
        place = place[key]
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(_JSON)
        break
    with contextlib.suppress(CheckpointError):
        read_quantisation(*files.values(), "folder")


def test_foreign_folders_are_read_without_our_record(folders: dict[str, Path], tmp_path: Path) -> None:
    """What llm-compressor and ModelOpt write has no fp4_spec.json: the values are the same, the rule is only assumed."""
    for style in ("compressed-tensors", "modelopt"):
        (tmp_path / style).mkdir()
        folder = copied(folders, style, tmp_path / style)
        ours = load_checkpoint(folder)
        (folder / "fp4_spec.json").unlink()
        theirs = load_checkpoint(folder)
        assert any("not on record" in note for note in theirs.notes)
        assert theirs.input_scales == ours.input_scales
        assert ours.notes == ()
        for name, q in ours.codes.items():
            assert torch.equal(theirs.codes[name].dequantise(), q.dequantise())
            assert torch.equal(theirs.tensors[name], q.dequantise())  # FP32: nothing says the scales are powers of two
    refused_folder = copied(folders, "halfbyte", tmp_path)
    (refused_folder / "fp4_spec.json").unlink()
    refused(refused_folder, CheckpointError, "no fp4_spec.json")


def test_scales_of_an_fp8_kv_cache_are_noted_and_ignored(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders, "modelopt", tmp_path)
    kv = {
        "model.layers.0.self_attn.k_proj.k_scale": torch.ones(()),
        "model.layers.0.self_attn.v_proj.v_scale": torch.ones(()),
    }
    edit_tensors(folder, lambda t: t.update(kv))
    edit_json(folder / "config.json", at("quantization_config", kv_cache_quant_algo="FP8"))
    assert any("KV cache" in note for note in load_checkpoint(folder).notes)


@pytest.mark.parametrize("style", ["compressed-tensors", "modelopt"])
def test_vllm_45543_a_tied_head_is_never_quantised(tmp_path: Path, style: str) -> None:
    """quantize leaves a tied head alone and writes no lm_head; a folder that quantised one is refused."""
    source = save(tmp_path / "model", TIED)
    quantize_model(str(source), tmp_path / "fp4", style=style, kind="w4a4")  # type: ignore[arg-type]
    config = json.loads((tmp_path / "fp4" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert "lm_head" in config["quantization_config"]["ignore"]
    checkpoint = load_checkpoint(tmp_path / "fp4")
    assert checkpoint.architecture.tie_embeddings
    assert [name for name in (*checkpoint.tensors, *checkpoint.codes) if "lm_head" in name] == []
    assert torch.equal(checkpoint.tensors["model.embed_tokens.weight"], weights(TIED)["model.embed_tokens.weight"])

    def quantise_the_head(tensors: dict[str, Tensor]) -> None:
        codes = "weight" if style == "modelopt" else "weight_packed"
        for part in (codes, *(p.removeprefix(f"{Q}.") for p in tensors if p.startswith(f"{Q}.") and "scale" in p)):
            tensors[f"lm_head.{part}"] = (
                tensors[f"{Q}.{part}"][:32].clone()
                if tensors[f"{Q}.{part}"].dim() == 2
                else (tensors[f"{Q}.{part}"].clone())
            )

    refused(edit_tensors(tmp_path / "fp4", quantise_the_head), CheckpointError, "ties the head", "quantised head")
    # Without the tie, the same files are a model with an FP4 head of its own.
    edit_json(tmp_path / "fp4" / "config.json", lambda c: c.update(tie_word_embeddings=False))
    separate = load_checkpoint(tmp_path / "fp4")
    assert not separate.architecture.tie_embeddings
    assert "lm_head.weight" in separate.codes


def test_a_tie_that_only_the_bits_tell_is_respected(tmp_path: Path) -> None:
    """No word on ties in config.json, and the head equals the embedding bit for bit."""
    tensors = weights(DENSE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    source = save(tmp_path / "model", DENSE, tensors)
    edit_json(source / "config.json", lambda c: c.pop("tie_word_embeddings"))
    quantize_model(str(source), tmp_path / "fp4", style="compressed-tensors", kind="w4a4")
    after = load_checkpoint(tmp_path / "fp4")
    assert after.architecture.tie_embeddings
    assert "lm_head.weight" not in after.tensors


def test_truncated_fp4_files_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders, "moe", tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(folder, CheckpointError, "cut short")
