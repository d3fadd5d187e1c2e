"""Shared fixtures: tiny random models of every family, as transformers saves them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

# A job in the background of a shell begins with Ctrl-C ignored, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():  # before anything imports Triton: its kernels are then run by its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}


def tiny_transformers_model(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A random model of ``family`` from transformers, with weights large enough that nothing is near zero."""
    import transformers

    sizes = {**SIZES, "tie_word_embeddings": family == "llama", **changes}
    if family == "qwen3_moe":
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
    config = getattr(transformers, f"{names[family]}Config")(**sizes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{names[family]}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            elif parameter.dim() > 1:
                parameter.mul_(8.0)
    return model


@pytest.fixture(scope="session")
def family_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> folder of a tiny random checkpoint."""
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        tiny_transformers_model(family).save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}
