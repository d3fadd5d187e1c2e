"""Tiny random models of every family, made and saved by transformers: the oracle of these tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "initializer_range": 0.3,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

#: case -> (class prefix in transformers, keys that differ)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama_tied_biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3_moe": ("Qwen3Moe", {**_MOE, "head_dim": 16, "mlp_only_layers": [0]}),
    "qwen3_moe_tied": ("Qwen3Moe", {**_MOE, "head_dim": 16, "decoder_sparse_step": 2, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@dataclass(frozen=True)
class Oracle:
    """A transformers model and the folder it saved itself to."""

    name: str
    model: Any
    folder: Path

    def logits(self) -> torch.Tensor:
        return logits(self.model)


def logits(model: Any) -> torch.Tensor:
    """Logits of 40 tokens in one sequence, no gradient."""
    ids = torch.arange(40)[None] * 7 % 96
    with torch.no_grad():
        return model(ids).logits  # type: ignore[no-any-return]


def make_model(case: str, **changes: Any) -> Any:
    """A random model with every vector (norms, biases) random too, so that a swapped tensor shows."""
    import transformers

    prefix, keys = CASES[case]
    config = getattr(transformers, f"{prefix}Config")(**{**_SIZES, **keys, **changes})
    torch.manual_seed(11)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0, 0.2)
    return model


@pytest.fixture(scope="session", params=list(CASES))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Each case in turn."""
    return _saved(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """The Qwen3-MoE case alone."""
    return _saved("qwen3_moe", tmp_path_factory)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """The Llama case alone."""
    return _saved("llama", tmp_path_factory)


def _saved(case: str, factory: pytest.TempPathFactory) -> Oracle:
    folder = factory.mktemp(case)
    model = make_model(case)
    model.save_pretrained(folder)
    return Oracle(case, model, folder)
