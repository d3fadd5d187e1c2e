"""Input scales: against a plain forward pass of transformers, and experts that no token reaches."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fp4_models import MODELS, MOE, save, weights

from halfbyte.errors import DataError, NumericsError
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.open_model import model_folder
from halfbyte.quantize.calibration import filled, input_amax
from halfbyte.quantize.export import quantize_model

SEQUENCES = [(3, 5, 7, 11, 13, 17), (4, 4, 9), (30, 2, 8, 21)]


@pytest.mark.parametrize("model", ["dense", "biased", "moe", "mixtral"])
def test_the_largest_inputs_are_those_of_a_plain_forward_pass(tmp_path: Path, model: str) -> None:
    """The oracle: transformers in FP32 with a hook on every linear module."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    folder = save(tmp_path / "model", MODELS[model])
    found = input_amax(load_checkpoint(folder), SEQUENCES)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: dict[str, float] = {}

    def watch(name: str) -> None:
        def hook(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen[name] = max(seen.get(name, 0.0), float(args[0].abs().amax()))

        oracle.get_submodule(name).register_forward_pre_hook(hook)

    # The engine asks for the logits of a prompt's last token only, so the head (never quantised) sees less.
    modules = [name for name in found if ".experts." not in name and name != "lm_head" and oracle_has(oracle, name)]
    for name in modules:
        watch(name)
    with torch.no_grad():
        for ids in SEQUENCES:
            oracle(torch.tensor([ids]))
    assert len(modules) >= 8
    for name in modules:
        assert found[name] == pytest.approx(seen[name], rel=0.03), name  # BF16 against FP32 products


def oracle_has(model: torch.nn.Module, name: str) -> bool:
    try:
        return isinstance(model.get_submodule(name), torch.nn.Linear)
    except AttributeError:
        return False


def test_each_expert_sees_its_own_tokens(tmp_path: Path) -> None:
    """Router and experts by hand, from the inputs of the router."""
    arch = replace(MOE, n_layers=1, mlp_only_layers=())
    tensors = {name: tensor.float() for name, tensor in weights(arch).items()}
    folder = save(tmp_path / "model", arch)
    found = input_amax(load_checkpoint(folder), SEQUENCES)
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs: list[torch.Tensor] = []
    oracle.model.layers[0].mlp.register_forward_pre_hook(lambda m, args: inputs.append(args[0][0]))
    with torch.no_grad():
        for ids in SEQUENCES:
            oracle(torch.tensor([ids]))
    x = torch.cat(inputs)
    chosen = (x @ tensors["model.layers.0.mlp.gate.weight"].T).topk(2).indices
    for e in range(arch.n_experts):
        prefix = f"model.layers.0.mlp.experts.{e}"
        rows = x[(chosen == e).any(1)]
        if not len(rows):
            assert f"{prefix}.gate_proj" not in found
            continue
        inner = torch.nn.functional.silu(rows @ tensors[f"{prefix}.gate_proj.weight"].T)
        inner = inner * (rows @ tensors[f"{prefix}.up_proj.weight"].T)
        assert (
            found[f"{prefix}.gate_proj"]
            == found[f"{prefix}.up_proj"]
            == pytest.approx(float(rows.abs().amax()), rel=0.03)
        )
        assert found[f"{prefix}.down_proj"] == pytest.approx(float(inner.abs().amax()), rel=0.05)


def test_compressed_tensors_595_vllm_45212_untouched_experts_are_filled_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two tokens reach at most two experts each of eight: the others get their layer's widest scale, never 0 or infinity."""
    text = tmp_path / "text.jsonl"
    text.write_text('{"prompt": "1"}\n')
    with caplog.at_level(logging.WARNING):
        report = quantize_model("tiny", tmp_path / "fp4", style="compressed-tensors", kind="w4a4", calibration=text)
    after = load_checkpoint(tmp_path / "fp4")
    record = json.loads((tmp_path / "fp4" / "fp4_spec.json").read_text())
    missed = record["uncalibrated_experts"]
    assert record["input_scales"] == "calibrated"
    assert any(".experts." in name for name in missed)
    assert any("never calibrated" in message for message in caplog.messages)
    assert {note.split()[0] for note in report.notes if "no calibration token" in note} == set(missed)
    assert set(after.input_scales) == {name.removesuffix(".weight") for name in after.codes}
    seen = input_amax(load_checkpoint(model_folder("tiny")), [_ids(text)])
    for name in missed:
        layer, part = name.split(".experts.")[0], name.rsplit(".", 1)[1]
        reached = [amax for other, amax in seen.items() if other.startswith(layer) and other.endswith(f".{part}")]
        assert seen.get(name, 0.0) == 0.0
        assert after.input_scales[name] == pytest.approx(max(reached) / 2688, rel=1e-6)


def _ids(text: Path) -> tuple[int, ...]:
    from halfbyte.models.open_model import open_model
    from halfbyte.quantize.calibration import read_calibration

    checkpoint, tokenizer = open_model("tiny")
    return read_calibration(text, tokenizer, checkpoint.architecture)[0]


def test_a_layer_without_any_token_is_an_error() -> None:
    modules = [f"model.layers.1.mlp.experts.{e}.{p}_proj" for e in range(4) for p in ("gate", "up", "down")]
    with pytest.raises(NumericsError, match="no expert of layer 1"):
        filled({}, MOE, modules)


def test_without_text_the_scale_is_a_constant_and_said_to_be(tmp_path: Path) -> None:
    source = save(tmp_path / "model", MOE)
    report = quantize_model(str(source), tmp_path / "fp4", style="modelopt", kind="w4a4")
    assert set(load_checkpoint(tmp_path / "fp4").input_scales.values()) == {0.125}
    assert any("constant 0.125" in note for note in report.notes)
    own = quantize_model(str(source), tmp_path / "own", style="halfbyte", kind="w4a4")
    assert own.notes == ()  # our engine scales every token


def test_calibration_text_that_cannot_be_used_is_refused_by_line(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    for content, words in (("", "no calibration text"), ('{"prompt": "1"}\n{"text": "2"}\n', "text.jsonl:2")):
        text.write_text(content)
        with pytest.raises(DataError, match=words):
            quantize_model("tiny", tmp_path / "fp4", style="modelopt", kind="w4a4", calibration=text)
    assert not (tmp_path / "fp4").exists()


def test_the_largest_inputs_do_not_depend_on_what_shares_the_batch(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(save(tmp_path / "model", MOE))
    together = input_amax(checkpoint, SEQUENCES)
    alone = [input_amax(checkpoint, [ids]) for ids in SEQUENCES]
    expected = {name: max(found.get(name, 0.0) for found in alone) for name in together}
    inputs = {
        name for name in together if not name.endswith("down_proj")
    }  # an expert's intermediate is not the kernel's own
    assert {n: together[n] for n in inputs} == {n: expected[n] for n in inputs}
    assert together == pytest.approx(expected, rel=1e-5)
