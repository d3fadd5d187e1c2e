"""The one forward pass in both executions against transformers, the independent oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from halfbyte.kernels import active
from halfbyte.learner.autograd import AutogradExecution
from halfbyte.learner.batch import collate
from halfbyte.learner.parameters import Parameters
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.decoder import logits as decoder_logits
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.engine import Engine, EngineOptions

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
TOLERANCE = 2e-4  # the bound on logits in FP32


def trajectory(ids: list[int], prompt: int) -> Trajectory:
    n = len(ids) - prompt
    return Trajectory(
        prompt_ids=np.array(ids[:prompt], np.int32),
        response_ids=np.array(ids[prompt:], np.int32),
        logprobs=np.zeros(n, np.float32),
        mask=np.ones(n, bool),
        versions=np.zeros(n, np.int32),
        sampling=SamplingParams(),
        precision=precision_from("fp32"),
        finish_reason="length",
    )


def oracle(folder: Path, ids: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        out: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return out


def learner_logits(folder: Path, rows: list[list[int]], *, packing: bool) -> list[torch.Tensor]:
    checkpoint = load_checkpoint(folder)
    precision = precision_from("fp32")
    parameters = Parameters(
        checkpoint.architecture, checkpoint.tensors, precision, active(), publish_dtype=torch.float32
    )
    batch = collate([trajectory(r, 1) for r in rows], packing=packing)
    run = AutogradExecution(parameters, batch, active(), checkpoint.architecture.rope_tables())
    with torch.no_grad():
        flat = decoder_logits(checkpoint.architecture, run, batch.ids)
    return [flat[s : s + len(r)] for s, r in zip(batch.starts.tolist(), rows)]


@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_logits_equal_transformers(family: str, family_folders: dict[str, Path]) -> None:
    folder = family_folders[family]
    ids = torch.randint(2, 64, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    checkpoint = load_checkpoint(folder)
    engine = Engine(
        checkpoint.architecture, precision_from("fp32"), checkpoint.tensors, options=EngineOptions(kv_memory_mb=2)
    )
    expected = torch.log_softmax(oracle(folder, ids), dim=-1)[range(3, 39), ids[4:]]
    assert expected.std() > 0.5, "the model must not be trivial"
    np.testing.assert_allclose(engine.score(ids[:4], ids[4:]), expected.numpy(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_learner_logits_equal_transformers(family: str, packing: bool, family_folders: dict[str, Path]) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(2, 64, (n,), generator=generator).tolist() for n in (17, 5, 29)]
    for got, ids in zip(learner_logits(family_folders[family], rows, packing=packing), rows):
        torch.testing.assert_close(got, oracle(family_folders[family], ids), atol=TOLERANCE, rtol=0)


def test_unsloth_zoo_840_padding_never_changes_a_logprob(family_folders: dict[str, Path]) -> None:
    rows = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17]]
    folder = family_folders["qwen3"]
    packed, padded = (learner_logits(folder, rows, packing=p) for p in (True, False))
    alone = learner_logits(folder, rows[:1], packing=True)
    for a, b in ((packed[0], padded[0]), (packed[1], padded[1]), (packed[0], alone[0])):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
