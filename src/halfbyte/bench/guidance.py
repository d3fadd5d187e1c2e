"""Cases of guidance: what recording adds to a quantise pass and to routed experts, and what rounding under guidance costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from halfbyte.bench import oracle
from halfbyte.bench.buffers import copies
from halfbyte.bench.case import Case
from halfbyte.bench.experts import Routed
from halfbyte.bench.operands import uneven
from halfbyte.bench.quantise import Conversions
from halfbyte.formats import Payload, PayloadBits, get_spec, payload_of, quantise
from halfbyte.kernels import Kernels, PackedExperts, PackedLinear, get

__all__ = ["guidance_cases"]

_SPEC = get_spec("halfbyte_token")
_BITS: tuple[PayloadBits, ...] = (4, 2, 1)


def guidance_cases(kernels: Kernels, conversions: Conversions, routed: Routed) -> Iterator[Case]:
    """Per shape and bits: quantising with a payload beside quantising, and guided rounding beside quantising and beside the
    learner's rounding without guidance (FP32, one global scale a token). Then linear and experts that
    record beside those that do not."""
    for rows, columns, budget in conversions.shapes:
        generator = torch.Generator().manual_seed(rows + columns)
        rolled = uneven(rows, columns, generator)
        mine = rolled * (1 + 2.0**-8 * torch.randn(rows, columns, generator=generator))
        inputs = copies(mine, mine.nbytes, budget, mine.clone)
        size = round(len(inputs) * mine.nbytes / 2**20, 1)
        facts = {"working_set_mib": size, "baseline_working_set_mib": size}
        plain: list[Callable[[], object]] = [partial(kernels.quantise, x, _SPEC) for x in inputs]
        unguided: list[Callable[[], object]] = [partial(kernels.fake_quantise, x, _SPEC) for x in inputs]
        case = partial(Case, n=0, k=columns, m=rows, facts=facts, elements=rows * columns, threads=conversions.threads)
        for bits in _BITS[1:]:
            yield case(
                kernel=f"quantise-payload-{bits}",
                ours=[partial(kernels.quantise_with_payload, x, _SPEC, bits) for x in inputs],
                baseline="halfbyte quantise",
                theirs=plain,
                error=partial(_payload_error, kernels, mine, bits),
            )
        for bits in _BITS:
            payload = kernels.quantise_with_payload(rolled, _SPEC, bits)[1]
            for name, theirs in (("halfbyte quantise", plain), ("halfbyte fake_quantise", unguided)):
                yield case(
                    kernel=f"guided-round-{bits}",
                    ours=[partial(kernels.guided_round, x, payload) for x in inputs],
                    baseline=name,
                    theirs=theirs,
                    error=partial(_guided_error, kernels, mine, payload),
                )
    yield from _recorded_linear(kernels, routed)
    yield from _recorded_experts(kernels, routed)


def _recorded_linear(kernels: Kernels, plan: Routed) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(66)
    n, k = plan.intermediate, plan.hidden
    w = kernels.pack_linear(
        uneven(n, k, generator), "w4a4", weight_spec=get_spec("halfbyte"), activation_spec=_SPEC, name="linear"
    )
    size = round(w.nbytes / 2**20, 1)
    for m in sorted({plan.tokens[0], plan.tokens[-1]}):
        x = uneven(m, k, generator) * k**0.5
        yield Case(
            kernel="linear-recorded",
            n=n,
            k=k,
            m=m,
            ours=[partial(kernels.linear_recorded, x, w, 1)],
            baseline="halfbyte linear",
            theirs=[partial(kernels.linear, x, w)],
            error=partial(_linear_error, kernels, x, w),
            facts={"working_set_mib": size, "baseline_working_set_mib": size},
        )


def _recorded_experts(kernels: Kernels, plan: Routed) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(65)
    e, h, i = plan.n_experts, plan.hidden, plan.intermediate
    gate_up = torch.stack([uneven(2 * i, h, generator) for _ in range(e)])
    down = torch.stack([uneven(h, i, generator) for _ in range(e)])
    w = kernels.pack_experts(gate_up, down, "w4a4", weight_spec=get_spec("halfbyte"), activation_spec=_SPEC)
    del gate_up, down
    size = round(w.nbytes / 2**20, 1)
    for m in sorted({plan.tokens[0], plan.tokens[-1]}):
        x, gates = uneven(m, h, generator) * h**0.5, torch.rand(m, plan.top, generator=generator)
        routes = [torch.rand(m, e, generator=generator).topk(plan.top).indices.to(torch.int32) for _ in range(16)]
        yield Case(
            kernel="experts-recorded",
            n=i,
            k=h,
            m=m,
            ours=[partial(kernels.experts_recorded, x, ids, gates, w) for ids in routes],
            baseline="halfbyte experts",
            theirs=[partial(kernels.experts, x, ids, gates, w) for ids in routes],
            error=partial(_recorded_error, kernels, x, routes[0], gates, w),
            facts={"experts": e, "working_set_mib": size, "baseline_working_set_mib": size},
        )


def _payload_error(kernels: Kernels, x: Tensor, bits: PayloadBits) -> float:
    """Residues as numbers, beside those of the definition."""
    exact = payload_of(quantise(x, _SPEC), bits).residues().double()
    return oracle.relative_error(kernels.quantise_with_payload(x, _SPEC, bits)[1].residues().double(), exact)


def _guided_error(kernels: Kernels, x: Tensor, payload: Payload) -> float:
    return oracle.relative_error(kernels.guided_round(x, payload), get("reference").guided_round(x, payload))


def _linear_error(kernels: Kernels, x: Tensor, w: PackedLinear) -> float:
    output, payload = kernels.linear_recorded(x, w, 1)
    exact = payload_of(quantise(x, _SPEC), 1).residues()
    return max(oracle.relative_error(output, kernels.linear(x, w)), oracle.relative_error(payload.residues(), exact))


def _recorded_error(kernels: Kernels, x: Tensor, ids: Tensor, gates: Tensor, w: PackedExperts) -> float:
    """The output beside that of the experts that do not record, and the recorded input beside the definition's."""
    record = kernels.experts_recorded(x, ids, gates, w)
    return max(
        oracle.relative_error(record.output, kernels.experts(x, ids, gates, w)),
        oracle.relative_error(oracle.values(record.inputs), oracle.values(quantise(x, _SPEC))),
    )
