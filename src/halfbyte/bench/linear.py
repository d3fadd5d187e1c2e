"""Cases of matrix products: ours in FP4 (activation quantisation included) or BF16, beside torch's BF16 linear."""

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
from halfbyte.formats import QuantTensor, get_spec
from halfbyte.kernels import Kernels, LinearKind, PackedLinear

__all__ = ["Products", "linear_cases"]


@dataclass(frozen=True)
class Products:
    """Shapes (n, k), tokens, and what a rotation of weights should exceed in bytes."""

    shapes: Sequence[tuple[int, int]]
    tokens: Sequence[int]
    budget: int


def linear_cases(kernels: Kernels, kind: LinearKind, plan: Products) -> Iterator[Case]:
    """One case a shape and number of tokens. Our input is float32, torch's BF16: each what it would be given."""
    activation = get_spec("halfbyte_token") if kind == "w4a4" else None
    for n, k in plan.shapes:
        generator = torch.Generator().manual_seed(n * 31 + k)
        weight = uneven(n, k, generator).to(torch.bfloat16)
        operand: Tensor | QuantTensor = weight
        if kind in ("w4a4", "w4a16"):
            operand = kernels.quantise(weight, get_spec("halfbyte"), name="weight")
        pack = partial(kernels.pack_linear, operand, kind, activation_spec=activation)
        first = pack()
        ours = copies(first, first.nbytes, plan.budget, pack)
        theirs = copies(weight, weight.nbytes, plan.budget, weight.clone)
        facts = {
            "working_set_mib": round(len(ours) * first.nbytes / 2**20, 1),
            "baseline_working_set_mib": round(len(theirs) * weight.nbytes / 2**20, 1),
        }
        for m in plan.tokens:
            x = uneven(m, k, generator)
            rounded = x.to(torch.bfloat16)
            yield Case(
                kernel=f"linear-{kind}",
                n=n,
                k=k,
                m=m,
                ours=[partial(kernels.linear, x, w) for w in ours],
                baseline="torch bf16 linear",
                theirs=[partial(torch.nn.functional.linear, rounded, w) for w in theirs],
                error=partial(_error, kernels, x, first, operand),
                facts=facts,
            )


def _error(kernels: Kernels, x: Tensor, w: PackedLinear, operand: Tensor | QuantTensor) -> float:
    exact = oracle.product(oracle.inputs(x, w.kind, w.activation_spec), operand)
    return oracle.relative_error(kernels.linear(x, w), exact)
