"""Rotary tables against exact values and against transformers."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import pytest
import torch

from halfbyte.models.architecture import Architecture
from halfbyte.models.rope import RopeScaling, inverse_frequencies, rope_tables

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    "llama3_32": {"rope_type": "llama3", "factor": 32.0, **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn_fixed": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.25,
        "truncate": False,
    },
}


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("case", list(CASES))
def test_tables_are_transformers_tables_to_its_rounding(case: str, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters={**CASES[case], "rope_theta": theta},
    )
    rotary = LlamaRotaryEmbedding(config)
    positions = torch.arange(4096)
    theirs = [table[0, :, :32] for table in rotary(torch.zeros(1), positions[None])]
    a = Architecture.from_hf({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    ours = a.rope_tables()
    # transformers' float32 steps, in units of 2**-24 of the frequency: the power amplifies the exponent's rounding by
    # (2i/d) ln(theta); a handful of other operations; the blends of llama3 and yarn amplify by up to `factor`.
    exponent = torch.arange(32, dtype=torch.float64) / 32
    operations = exponent * math.log(theta) + 8 + 8 * CASES[case].get("factor", 0.0)
    angle = positions[:, None] * inverse_frequencies(64, theta, a.rope_scaling)
    bound = angle * operations * 2.0**-24 * 1.5 + 2.0**-22
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        assert mine.shape == other.shape == (4096, 32)
        assert bool(((mine.double() - other.double()).abs() <= bound).all())


def test_tables_are_the_exact_values_rounded_once() -> None:
    cos, sin = rope_tables(3001, 16, 10000.0)
    with mpmath.workdps(40):
        for position in (0, 1, 17, 999, 3000):
            for pair in range(8):
                angle = position * mpmath.mpf(10000) ** (-mpmath.mpf(2 * pair) / 16)
                for table, exact in ((cos, mpmath.cos(angle)), (sin, mpmath.sin(angle))):
                    nearest = torch.tensor(float(exact), dtype=torch.float64).float()
                    assert table[position, pair] == nearest


def test_llama3_keeps_fast_and_divides_slow_frequencies() -> None:
    scaling = RopeScaling(kind="llama3", factor=8.0, original_max_positions=1024)
    plain, scaled = inverse_frequencies(64, 500000.0), inverse_frequencies(64, 500000.0, scaling)
    rotations = 1024 * plain / (2 * math.pi)
    fast, slow = rotations >= 4, rotations <= 1
    assert 0 < int(fast.sum()) < 32
    assert 0 < int(slow.sum()) < 32
    assert torch.equal(scaled[fast], plain[fast])
    assert torch.allclose(scaled[slow], plain[slow] / 8, rtol=1e-15)
    between = ~fast & ~slow
    assert bool((scaled[between] < plain[between]).all())
    assert bool((scaled[between] > plain[between] / 8).all())
