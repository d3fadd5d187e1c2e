"""Memory by arithmetic, against files and models that were really made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from halfbyte.errors import CheckpointError, ConfigError, RefitError
from halfbyte.models.open_model import model_folder
from halfbyte.trial import memory


def test_weights_of_the_shipped_policy() -> None:
    from halfbyte.models import load_checkpoint

    folder = model_folder("tiny")
    found = memory.weight_bytes(folder)
    tensors = load_checkpoint(folder).tensors
    assert found.total == sum(t.numel() * t.element_size() for t in tensors.values())
    assert found.tensors == len(tensors)


def test_weights_by_dtype(tmp_path: Path) -> None:
    save_file({"a": np.zeros((3, 5), np.float32)}, tmp_path / "1.safetensors")
    save_file({"b": np.zeros(7, np.uint8), "c": np.zeros((0, 4), np.float16)}, tmp_path / "2.safetensors")
    found = memory.weight_bytes(tmp_path)
    assert (found.total, found.files, found.by_dtype) == (67, 2, {"F16": 0, "F32": 60, "U8": 7})


def test_missing_or_damaged_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no safetensors"):
        memory.weight_bytes(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(RefitError):
        memory.weight_bytes(tmp_path)


def test_kv_bytes_are_those_of_the_engine() -> None:
    from halfbyte.models.precision import PRESETS
    from halfbyte.planning.footprint import kv_bytes, open_architecture

    folder = model_folder("tiny")
    architecture = open_architecture(folder)
    for name, ours in (("bf16", "bf16"), ("w4a4kv4", "fp4")):
        assert memory.kv_bytes_per_token(folder, ours) == kv_bytes(architecture, PRESETS[name])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}, 2 * 2 * 2 * 64),
        ({"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 256}, 2 * 2 * 8 * 32),
        ({"text_config": {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}}, 3 * 2 * 4 * 16),
        # DeepSeek's latent attention: 512 + 64 a layer
        (
            {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            61 * 576,
        ),
    ],
)
def test_kv_bytes_by_hand(config: dict[str, object], values: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert memory.kv_bytes_per_token(tmp_path, "bf16") == 2 * values
    assert memory.kv_bytes_per_token(config, "fp8") == values
    assert memory.kv_bytes_per_token(config, "fp4") == round(values * 0.5625)


def test_config_that_says_too_little(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        memory.kv_bytes_per_token(tmp_path, "bf16")
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        memory.kv_bytes_per_token({"num_attention_heads": 4}, "bf16")


def test_fit() -> None:
    assert memory.fit(60, 2, 10, 80).fits
    assert memory.fit(60, 2, 10, 80).total == 80
    assert not memory.fit(60, 2, 10, 80, rest=1).fits
    with pytest.raises(ConfigError):
        memory.fit(-1, 2, 10, 80)
