"""The learner off the CPU, on a simulated device: nothing mixes devices, and the numbers are those of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sharded_case
import torch
from elsewhere import DEVICE, Elsewhere, Simulated

from halfbyte.config import LearnerConfig, ObjectiveConfig, load_config
from halfbyte.errors import ConfigError
from halfbyte.formats import SPECS, QuantSpec
from halfbyte.kernels import Kernels, get
from halfbyte.kernels.registry import for_device
from halfbyte.learner.learner import Learner
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.train.device import device_of


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``fused`` AdamW exists for CPU and CUDA; of the simulated device torch has to be told."""
    from torch.optim import optimizer

    real = optimizer._get_fused_kernels_supported_devices
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: [*real(), DEVICE.type])
    with Simulated():
        yield


def make(case: dict[str, Any], device: torch.device | None, kernels: Kernels | None = None) -> Learner:
    checkpoint = load_checkpoint(Path(case["checkpoint"]))
    return Learner(
        checkpoint.architecture,
        checkpoint.tensors,
        precision=sharded_case.chosen(case),
        rollout_precision=sharded_case.chosen(case),
        config=LearnerConfig(**{"schedule": "constant", "warmup_steps": 0, **case.get("learner", {})}),
        objective_config=ObjectiveConfig(**case.get("objective", {})),
        kernels=kernels or get("reference"),
        total_steps=10,
        alignment=case.get("alignment"),
        device=device,
    )


def test_the_simulation_refuses_what_a_device_would(simulated: None) -> None:
    there = torch.ones(3, device=DEVICE)
    assert isinstance(there, Elsewhere)
    assert (there * torch.tensor(2.0)).cpu().tolist() == [2.0] * 3
    with pytest.raises(AssertionError, match="two devices"):
        there + torch.ones(3)
    with pytest.raises(AssertionError, match="as if it were here"):
        there.numpy()
    assert (there + 1).sum().item() == 6.0
    x = torch.linspace(1.0, 2.0, 1000)
    by_reciprocal = (x.to(DEVICE) / torch.tensor(6.0)).cpu()
    assert torch.equal(by_reciprocal, x * (1.0 / torch.tensor(6.0)))
    assert not torch.equal(by_reciprocal, x / 6.0)
    assert torch.equal((x.to(DEVICE) / torch.tensor(6.0).to(DEVICE)).cpu(), x / 6.0)


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_divisor_stays_on_the_cpu(spec: QuantSpec, dtype: torch.dtype, simulated: None) -> None:
    """A GPU multiplies by the reciprocal of such a divisor, and codes at a border come out differently."""
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(64, 320, generator=generator) * torch.exp(torch.randn(64, 1, generator=generator))).to(dtype)
    kernels, there = get("reference"), x.to(DEVICE)
    given = [None] if spec.format == "mxfp4" else [None, torch.tensor(0.0371)]  # from calibration, on the CPU
    for global_scale in given:
        q = kernels.quantise(x, spec, global_scale=global_scale)
        moved = kernels.quantise(there, spec, global_scale=global_scale)
        assert torch.equal(moved.codes.cpu(), q.codes)
        assert torch.equal(moved.scales.cpu(), q.scales)
        assert torch.equal(kernels.dequantise(moved).cpu(), kernels.dequantise(q))
        if spec.scale_rows == 1:
            parts = {"codes": q.codes.to(DEVICE), "scales": q.scales.to(DEVICE)}
            payload = replace(kernels.payload(q, 4), **parts)  # its one global scale comes from the CPU
            guided = kernels.guided_round(there * 1.04, payload)
            assert torch.equal(guided.cpu(), kernels.guided_round(x * 1.04, kernels.payload(q, 4)))


@pytest.mark.parametrize(
    "case",
    [
        {"family": "qwen3_moe", "precision": "w4a4kv4"},
        {"family": "qwen3_moe", "precision": "experts-w4a4kv4", "objective": {"kl_coef": 0.1, "entropy_coef": 0.01}},
        {"family": "llama", "precision": "fp32", "learner": {"packing": False}},
        {"family": "qwen3", "global_update": "hysteretic"},
    ],
    ids=lambda case: case.get("global_update", case.get("precision")),
)
def test_a_step_off_the_cpu_has_the_numbers_of_the_cpu(
    case: dict[str, Any], family_folders: dict[str, Path], simulated: None
) -> None:
    case = {**case, "checkpoint": str(family_folders[case["family"]])}
    trajectories = sharded_case.rollouts(case)
    here, there = make(case, None), make(case, DEVICE)
    for place, leaf in here.parameters._effective.items():
        assert torch.equal(there.parameters._effective[place].cpu(), leaf), f"{place}: rounded to the same bits"
    left, right = here.score(trajectories), there.score(trajectories)
    exact = sharded_case.chosen(case).exact
    same = ((right.logp - left.logp).abs() <= 1e-5 * left.logp.abs().clamp(min=1.0)).float().mean()
    assert float(same) >= (1.0 if exact else 0.9), (
        "sums in other orders; an activation at a border may be rounded the other way"
    )
    found = []
    for learner in (here, there):
        caught: dict[str, torch.Tensor] = {}
        real = learner.optimiser.step

        def spy(gradients: dict[str, torch.Tensor], factor: float, caught: Any = caught, real: Any = real) -> float:
            caught.update({name: gradient.cpu().clone() for name, gradient in gradients.items()})
            return float(real(gradients, factor))

        learner.optimiser.step = spy  # type: ignore[method-assign]
        result = learner.step(trajectories, 0)
        assert result.changed
        found.append((caught, result.metrics))
    (ours, metrics), (theirs, their_metrics) = found
    assert ours.keys() == theirs.keys()
    for (
        name,
        gradient,
    ) in ours.items():  # the framework takes other paths to its products, so sums differ in their last bits
        difference = float(torch.linalg.vector_norm(theirs[name] - gradient) / torch.linalg.vector_norm(gradient))
        assert difference <= (1e-5 if exact else 1e-2), name
    assert metrics.keys() == their_metrics.keys()
    assert all(isinstance(master, Elsewhere) for master in there.parameters.masters.values())
    assert not any(isinstance(tensor, Elsewhere) for _, tensor in there.parameters.published()), (
        "for stores and engines"
    )
    state = there.optimiser.state()
    again = make(case, DEVICE)
    again.optimiser.load_state({name: tensor.cpu() for name, tensor in state.items()})
    for name, tensor in again.optimiser.state().items():
        assert torch.equal(tensor.cpu(), state[name].cpu())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_step_on_cuda(family_folders: dict[str, Path]) -> None:
    """Weights rounded to the CPU's bits by compiled kernels; log-probs within the sums' rounding, and a step is taken."""
    case = {"family": "qwen3_moe", "precision": "w4a4kv4", "checkpoint": str(family_folders["qwen3_moe"])}
    trajectories = sharded_case.rollouts(case)
    here, there = make(case, None), make(case, torch.device("cuda"), for_device("cuda", "auto"))
    for place, leaf in here.parameters._effective.items():
        assert torch.equal(there.parameters._effective[place].cpu(), leaf), place
    left, right = here.score(trajectories), there.score(trajectories)
    same = ((right.logp - left.logp).abs() <= 1e-4 * left.logp.abs().clamp(min=1.0)).float().mean()
    assert float(same) >= 0.8, "sums in other orders; an activation at a border may be rounded the other way"
    assert there.step(trajectories, 0).changed


def test_a_device_that_is_not_there_is_refused() -> None:
    config = load_config(flags={"learner.device": "cuda"})
    if torch.cuda.is_available():
        assert device_of(config).type == "cuda"
    else:
        with pytest.raises(ConfigError, match="no CUDA device"):
            device_of(config)
        assert device_of(load_config(flags={"learner.device": "auto"})).type == "cpu"
    with pytest.raises(ConfigError, match="for the CPU"):
        load_config(flags={"learner.device": "auto", "learner.execution": "native"})
