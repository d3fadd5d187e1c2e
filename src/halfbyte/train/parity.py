"""Why parity broke: the first layer at which rollout and learner differ on a sample, each run again on its own path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from halfbyte.errors import NumericsError
from halfbyte.learner.batch import collate
from halfbyte.learner.learner import Scored
from halfbyte.learner.native import NativeExecution, PackedModel
from halfbyte.learner.parameters import Parameters
from halfbyte.models.decoder import hidden_states
from halfbyte.models.execution import Execution
from halfbyte.models.trajectory import Trajectory
from halfbyte.rollout.packed import PackedExecution, StepBatch
from halfbyte.rollout.pages import PagePool
from halfbyte.rollout.weights import RolloutWeights

__all__ = ["explain", "first_difference", "require_parity"]

_PAGE = 16


def require_parity(
    scored: Scored, trajectories: Sequence[Trajectory], version: int, explain_sample: Callable[[Trajectory], str]
) -> None:
    """Stop if a token sampled at ``version`` has another log-prob in the learner.

    Raises:
        NumericsError: naming the token and the first layer that differs.
    """
    gap = torch.where(scored.mask & (scored.versions == version), scored.logp - scored.rollout_logp, 0.0)
    worst = int(gap.abs().argmax())
    if gap[worst] == 0.0:
        return
    t = trajectories[int(scored.sequence[worst])]
    raise NumericsError(
        f"the learner's log-prob of a sampled token differs by {float(gap[worst]):.3g}",
        where=f"trajectory group {t.group} sample {t.sample}, {explain_sample(t)}",
        expected="a gap of exactly 0 (learner.require_parity)",
        fix="report this with the run folder; learner.require_parity = false goes on",
    )


def explain(rollout: RolloutWeights, learner: PackedModel, parameters: Parameters, t: Trajectory) -> str:
    """In words: the first layer and position whose outputs differ on ``t``.

    Arguments:
        rollout: the weights that ``t`` was sampled with.
        learner, parameters: the learner's weights.
    """
    kernels = parameters.kernels
    found = first_difference(_rollout_layers(rollout, parameters, t), _learner_layers(learner, parameters, t))
    if found is None:
        return f"no layer differs when the sample is run again with {kernels.name} kernels: the engine's pages or weights do"
    layer, position = found
    return f"first at {layer}, position {position} (kernels {kernels.name})"


def first_difference(
    ours: Iterator[tuple[str, Tensor]], theirs: Iterator[tuple[str, Tensor]]
) -> tuple[str, int] | None:
    """Name of the first output that is not equal bit for bit, and its first row that is not."""
    for (name, a), (_, b) in zip(ours, theirs):
        rows = (a != b).any(dim=1).nonzero()
        if len(rows):
            return name, int(rows[0])
    return None


def _learner_layers(weights: PackedModel, parameters: Parameters, t: Trajectory) -> Iterator[tuple[str, Tensor]]:
    batch = collate([t])
    tables = parameters.arch.rope_tables(len(t))
    run = NativeExecution(parameters, weights, batch, parameters.kernels, tables)
    return _named(_watched(run, parameters, batch.ids))


def _rollout_layers(weights: RolloutWeights, parameters: Parameters, t: Trajectory) -> Iterator[tuple[str, Tensor]]:
    """The prompt in one pass, then token by token, as it was sampled."""
    arch, kernels = weights.arch, parameters.kernels
    total, prompt = len(t), len(t.prompt_ids)
    pool = PagePool(arch, weights.precision, kernels, -(-total // _PAGE), _PAGE)
    table = torch.arange(pool.n_pages, dtype=torch.int32)[None]
    generated = torch.from_numpy(np.concatenate([np.zeros(prompt, bool), t.mask]))
    parts: list[list[Tensor]] = []
    for begin, end in [(0, prompt), *((i, i + 1) for i in range(prompt, total))]:
        place = torch.arange(begin, end)
        batch = StepBatch(
            ids=torch.from_numpy(t.ids[begin:end].astype(np.int64)),
            positions=place,
            slots=place,
            page_table=table,
            query_start=torch.tensor([0, end - begin], dtype=torch.int32),
            context_length=torch.tensor([end], dtype=torch.int32),
            generated=generated[begin:end] if weights.precision.phased else None,
            rows=torch.arange(0),
        )
        parts.append(_watched(PackedExecution(weights, pool, kernels, batch), parameters, batch.ids))
    return _named([torch.cat(columns) for columns in zip(*parts)])


@torch.no_grad()
def _watched(run: Execution, parameters: Parameters, ids: Tensor) -> list[Tensor]:
    """Embedding, output of every layer, final norm; each [T, hidden]."""
    seen = [run.embed(ids)]
    layer = run.layer

    def watch(index: int, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        out = layer(index, function, x)
        seen.append(out)
        return out

    run.layer = watch  # type: ignore[method-assign]
    last = hidden_states(parameters.arch, run, ids)
    return [*seen, last]


def _named(outputs: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield "model.embed_tokens", outputs[0]
    for index, out in enumerate(outputs[1:-1]):
        yield f"model.layers.{index}", out
    yield "model.norm", outputs[-1]
