"""``halfbyte doctor``: facts of this machine, and memory predictions held against weights really packed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.cli.doctor import _model
from halfbyte.cli.main import main
from halfbyte.kernels import active, get
from halfbyte.kernels.kv import kv_bytes_per_token
from halfbyte.models import Architecture, parameter_shapes, save_checkpoint
from halfbyte.models.precision import PRESETS
from halfbyte.planning.footprint import footprint, kv_bytes, open_architecture, weight_bytes
from halfbyte.rollout.weights import RolloutWeights

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LLAMA = {**SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN2 = {**SHAPE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
MOE = {
    **SHAPE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
ODD = {**LLAMA, "hidden_size": 72, "num_attention_heads": 6, "head_dim": 12, "intermediate_size": 100}
CONFIGS = {"llama": LLAMA, "qwen2, tied, biases": QWEN2, "qwen3_moe": MOE, "odd sizes": ODD}


@pytest.fixture(autouse=True)
def _environment_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))


def architecture(config: dict[str, Any]) -> Architecture:
    return Architecture.from_hf(config, "test")


def tensors(arch: Architecture) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator).bfloat16() for n, s in parameter_shapes(arch).items()}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("preset", PRESETS)
def test_predicted_weights_are_those_packed(config: dict[str, Any], preset: str) -> None:
    arch, precision = architecture(config), PRESETS[preset]
    packed = RolloutWeights.pack(arch, precision, tensors(arch), active(), version=0, n_positions=16)
    predicted, notes = weight_bytes(arch, precision)
    assert sum(predicted.values()) == pytest.approx(packed.nbytes, rel=0.05)
    assert bool(notes) == bool(packed.fallbacks)


@pytest.mark.parametrize("preset", PRESETS)
def test_predicted_kv_is_that_of_the_pages(preset: str) -> None:
    arch, precision = architecture(MOE), PRESETS[preset]
    layer = get("reference").new_kv_layer(3, 32, arch.n_kv_heads, arch.head_dim, precision.kv, precision.kv_spec)
    assert kv_bytes(arch, precision) == arch.n_layers * kv_bytes_per_token(arch.n_kv_heads, arch.head_dim, precision.kv)
    assert kv_bytes(arch, precision) == arch.n_layers * layer.nbytes / (3 * 32)


def test_fp4_weights_take_a_third_of_bf16() -> None:
    rows = {row["precision"]: row for row in footprint(architecture(LLAMA), 128)["precisions"]}
    quarter = rows["w4a4kv4"]["weight_bytes_by_site"]["mlp"] / rows["bf16"]["weight_bytes_by_site"]["mlp"]
    assert 4.5 / 16 < quarter < 0.35
    assert rows["bf16"]["kv_bytes_per_token"] / rows["w4a4kv4"]["kv_bytes_per_token"] == pytest.approx(16 / 4.5)
    assert rows["bf16"]["total_bytes"] == rows["bf16"]["weight_bytes"] + 128 * rows["bf16"]["kv_bytes_per_token"]


def test_a_head_without_whole_blocks_has_no_fp4_cache() -> None:
    rows = {row["precision"]: row for row in footprint(architecture(ODD), 128)["precisions"]}
    assert rows["w4a4kv4"]["kv_bytes"] is None
    assert any("head_dim 12" in note for note in rows["w4a4kv4"]["notes"])
    assert any("stay in BF16" in note for note in rows["w4a4kv4"]["notes"])
    assert rows["bf16"]["notes"] == []


def test_ties_are_resolved_from_the_weights_where_they_are_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2 | {"tie_word_embeddings": False}))
    assert not open_architecture(tmp_path).tie_embeddings
    arch = architecture(QWEN2)
    save_checkpoint(tmp_path / "model", arch, tensors(arch))
    assert open_architecture(tmp_path / "model").tie_embeddings


def test_the_text_names_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    assert main(["doctor", str(tmp_path), "--context", "1000"]) == 0
    text = capsys.readouterr().out
    for word in ("processor", "threads", f"kernels      {active().name}", "torch", "transformers", "kv 1000 tokens"):
        assert word in text
    for preset in PRESETS:
        assert text.count(f"\n{preset} ") == 2
    assert all(line == line.rstrip() for line in text.splitlines())


def test_the_text_survives_a_model_without_fp4_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ODD))
    assert main(["doctor", str(tmp_path)]) == 0
    assert "not possible" in capsys.readouterr().out


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"halfbyte", "processor", "threads", "kernels", "versions", "extras", "precisions"} == facts.keys()
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["kernels"]["active"] == active().name
    operations = facts["kernels"]["native"] + facts["kernels"]["reference"]
    assert {"quantise", "linear", "experts", "attention", "sample"} <= set(operations)
    assert len(operations) == len(set(operations))


@pytest.mark.parametrize(
    ("name", "text"), [("none", None), ("broken", "{"), ("unknown", '{"architectures": ["BertModel"]}')]
)
def test_a_folder_that_cannot_be_costed(
    tmp_path: Path, name: str, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / name
    if text is not None:
        folder.mkdir()
        (folder / "config.json").write_text(text)
    assert main(["doctor", str(folder)]) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_columns_of_the_sites_add_up_to_the_weights(config: dict[str, Any]) -> None:
    model = footprint(architecture(config), 128) | {"folder": "m"}
    header, *rows = [line.split() for line in _model(model) if line.startswith(("precision", *PRESETS))]
    count = header.index("kv/token") - 2
    sites = header[2 : 2 + count]
    assert len(rows) >= len(PRESETS)
    for row in model["precisions"]:
        assert sum(row["weight_bytes_by_site"][site] for site in sites) == row["weight_bytes"]


@pytest.mark.parametrize("context", ["-5", "0"])
def test_a_context_without_tokens_is_refused(context: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--context", context]) == 2
    assert f"--context is {context}" in capsys.readouterr().err
