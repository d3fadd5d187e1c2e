"""One training step after another on this checkpoint, on one process or on the ranks that torchrun started; what came out goes
to a folder. ``python sharded_case.py CASES.json`` with rows of {checkpoint, out, precision, learner, objective, steps}."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from halfbyte.config import LearnerConfig, ObjectiveConfig
from halfbyte.kernels import active
from halfbyte.learner.learner import Learner
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.precision import Precision, precision_from, with_weight_spec
from halfbyte.models.safetensors_io import write_safetensors
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request


def chosen(case: dict[str, Any]) -> Precision:
    precision = precision_from(case.get("precision", "w4a4kv4"))
    if case.get("weight_spec"):
        from halfbyte.formats import get_spec

        precision = with_weight_spec(precision, get_spec(case["weight_spec"]))
    if case.get("global_update"):
        precision = with_weight_spec(precision, precision.weight_spec.replace(global_update=case["global_update"]))
    return precision


def rollouts(case: dict[str, Any]) -> list[Trajectory]:
    checkpoint = load_checkpoint(Path(case["checkpoint"]))
    engine = Engine(checkpoint.architecture, chosen(case), checkpoint.tensors, options=EngineOptions(kv_memory_mb=2))
    requests = [
        Request(tuple(range(3, 6 + 4 * g)), SamplingParams(max_tokens=9), n=case.get("samples", 4), key=g, group=g)
        for g in range(case.get("groups", 3))
    ]
    out = engine.generate(requests)
    for i, t in enumerate(out):
        t.reward = float((i * 7) % 4)
    return out


def make_learner(case: dict[str, Any], ranks: Any = None) -> Learner:
    checkpoint = load_checkpoint(Path(case["checkpoint"]))
    more: dict[str, Any] = {}
    if ranks is not None:
        from halfbyte.learner.sharded.parameters import ShardedParameters

        more = {"ranks": ranks, "make_parameters": lambda *a, **k: ShardedParameters(*a, **k, group=ranks)}
    return Learner(
        checkpoint.architecture,
        checkpoint.tensors,
        precision=chosen(case),
        rollout_precision=chosen(case),
        config=LearnerConfig(**{"schedule": "constant", "warmup_steps": 0, **case.get("learner", {})}),
        objective_config=ObjectiveConfig(**case.get("objective", {})),
        kernels=active(),
        total_steps=10,
        **more,
    )


def whole(learner: Learner, name: str, own: torch.Tensor) -> torch.Tensor:
    """All rows of a tensor whose own rows are given: zeros elsewhere, then a sum over the ranks."""
    parameters = learner.parameters
    if learner.ranks.size == 1:
        return own.clone()
    out = torch.zeros((parameters.layout.shapes[name][0], *own.shape[1:]))  # type: ignore[attr-defined]
    begin, end = parameters.span(name)
    out[begin:end] = own
    return learner.ranks.add(out)


def look(learner: Learner) -> dict[str, torch.Tensor]:
    """Effective and published weights, whole."""
    found = {f"published {name}": t.clone() for name, t in learner.parameters.published()}
    for (name, kind), leaf in learner.parameters._effective.items():
        own = leaf.to_local() if learner.ranks.size > 1 else leaf  # type: ignore[attr-defined]
        found[f"effective {kind} {name}"] = whole(learner, name, own.detach())
    return found | {f"scale {name}": scale.reshape(1) for name, scale in learner.parameters.published_scales().items()}


def play(case: dict[str, Any], ranks: Any = None) -> None:
    trajectories = rollouts(case)
    learner = make_learner(case, ranks)
    tensors = {f"start {name}": tensor for name, tensor in look(learner).items()}
    rows, norms = [], []
    real = learner.optimiser.step

    def spy(gradients: dict[str, torch.Tensor], factor: float) -> float:
        for name, own in gradients.items():
            tensors[f"gradient {len(norms)} {name}"] = whole(learner, name, own).clone()
        norms.append(real(gradients, factor))
        return norms[-1]

    learner.optimiser.step = spy  # type: ignore[method-assign]
    for step in range(case.get("steps", 1)):
        scored = learner.score(trajectories)
        tensors |= {f"logp {step}": scored.logp, f"entropy {step}": scored.entropy}
        result = learner.step(trajectories, step)
        rows.append({"changed": result.changed, **result.metrics})
    for name, master in learner.parameters.masters.items():
        tensors[f"master {name}"] = whole(learner, name, master).clone()
    tensors |= look(learner)
    if learner.ranks.rank == 0:
        out = Path(case["out"])
        out.mkdir(parents=True, exist_ok=True)
        write_safetensors(out / "tensors.safetensors", tensors)
        (out / "rows.json").write_text(json.dumps({"rows": rows, "norms": norms, "memory": learner.memory()}))


def main() -> None:
    torch.set_num_threads(1)
    cases = json.loads(Path(sys.argv[1]).read_text())
    group = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import torch.distributed as dist

        from halfbyte.learner.sharded.group import Group

        dist.init_process_group("gloo")
        group = Group()
    for case in cases:
        play(case, group)
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
