"""Cases of routed experts: W4A4 beside our own BF16 twin, the same routes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from halfbyte.bench import oracle
from halfbyte.bench.buffers import copies
from halfbyte.bench.case import Case
from halfbyte.bench.operands import uneven
from halfbyte.formats import QuantSpec, QuantTensor, get_spec
from halfbyte.kernels import Kernels, PackedExperts, get

__all__ = ["Routed", "expert_cases"]

#: Routings that the calls go through, so that few tokens do not meet the experts of the call before.
_ROUTINGS = 16


@dataclass(frozen=True)
class Routed:
    """Experts, experts a token, sizes, tokens, and what a rotation of weights should exceed in bytes."""

    n_experts: int
    top: int
    hidden: int
    intermediate: int
    tokens: Sequence[int]
    budget: int


def expert_cases(kernels: Kernels, plan: Routed) -> Iterator[Case]:
    """One case a number of tokens; every call has another routing (uniform, without repetition in a token)."""
    generator = torch.Generator().manual_seed(64)
    e, h, i = plan.n_experts, plan.hidden, plan.intermediate
    gate_up = torch.stack([_weight(2 * i, h, generator) for _ in range(e)])
    down = torch.stack([_weight(h, i, generator) for _ in range(e)])
    twin = kernels.pack_experts(gate_up, down, "bf16")
    theirs = copies(twin, twin.nbytes, plan.budget, partial(kernels.pack_experts, gate_up, down, "bf16"))
    weight_spec, activation_spec = get_spec("halfbyte"), get_spec("halfbyte_token")
    codes = _stacked(kernels, gate_up, weight_spec), _stacked(kernels, down, weight_spec)
    del gate_up, down
    pack = partial(kernels.pack_experts, *codes, "w4a4", activation_spec=activation_spec)
    first = pack()
    ours = copies(first, first.nbytes, plan.budget, pack)
    facts = {
        "experts": e,
        "experts_per_token": plan.top,
        "working_set_mib": round(len(ours) * first.nbytes / 2**20, 1),
        "baseline_working_set_mib": round(len(theirs) * twin.nbytes / 2**20, 1),
    }
    for m in plan.tokens:
        x = uneven(m, h, generator) * h**0.5
        gates = torch.rand(m, plan.top, generator=generator).softmax(-1)
        routes = [
            torch.rand(m, e, generator=generator).topk(plan.top).indices.to(torch.int32) for _ in range(_ROUTINGS)
        ]
        yield Case(
            kernel="experts-w4a4",
            n=i,
            k=h,
            m=m,
            ours=_calls(kernels, x, routes, gates, ours),
            baseline="halfbyte bf16 experts",
            theirs=_calls(kernels, x, routes, gates, theirs),
            error=partial(_error, kernels, x, routes[0], gates, first, codes, activation_spec),
            facts=facts,
        )


def _weight(n: int, k: int, generator: torch.Generator) -> Tensor:
    return uneven(n, k, generator).to(torch.bfloat16)


def _calls(
    kernels: Kernels, x: Tensor, routes: Sequence[Tensor], gates: Tensor, weights: Sequence[PackedExperts]
) -> list[partial[Tensor]]:
    count = len(routes) * len(weights)
    return [
        partial(kernels.experts, x, routes[i % len(routes)], gates, weights[i % len(weights)]) for i in range(count)
    ]


def _stacked(kernels: Kernels, weight: Tensor, spec: QuantSpec) -> QuantTensor:
    parts = [kernels.quantise(w, spec, name="expert") for w in weight]
    return QuantTensor(
        torch.stack([p.codes for p in parts]),
        torch.stack([p.scales for p in parts]),
        torch.stack([p.global_scale for p in parts]),
        spec,
        tuple(weight.shape),
    )


def _one(stack: QuantTensor, e: int) -> QuantTensor:
    return QuantTensor(stack.codes[e], stack.scales[e], stack.global_scale[e], stack.spec, stack.shape[1:])


def _error(
    kernels: Kernels,
    x: Tensor,
    ids: Tensor,
    gates: Tensor,
    w: PackedExperts,
    codes: tuple[QuantTensor, QuantTensor],
    spec: QuantSpec,
) -> float:
    """Two steps, because the second product's operands are codes of the first one's float32 result: the intermediate of the
    definition (reference kernels) against float64, and the output against float64 on that intermediate's codes."""
    reference = get("reference")
    exact = torch.zeros(x.shape[0], w.hidden, dtype=torch.float64)
    worst = 0.0
    for e in torch.unique(ids).tolist():
        rows, slots = (ids == e).nonzero(as_tuple=True)
        gate_up, down = _one(codes[0], e), _one(codes[1], e)
        packed = reference.pack_linear(gate_up, "w4a4", activation_spec=spec)
        inner = reference.swiglu(reference.linear(x[rows], packed))
        gate, up = oracle.product(oracle.inputs(x[rows], "w4a4", spec), gate_up).chunk(2, dim=1)
        worst = max(worst, oracle.relative_error(inner, torch.nn.functional.silu(gate) * up))
        part = oracle.product(oracle.inputs(inner, "w4a4", spec), down)
        exact.index_add_(0, rows, gates[rows, slots, None].double() * part)
    return max(worst, oracle.relative_error(kernels.experts(x, ids, gates, w), exact))
