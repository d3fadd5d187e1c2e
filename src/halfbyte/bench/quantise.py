"""Cases of quantising BF16 to NVFP4 and back, beside other libraries and our reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfbyte.bench import oracle
from halfbyte.bench.buffers import copies
from halfbyte.bench.case import Case
from halfbyte.bench.libraries import Library
from halfbyte.formats import dequantise as by_definition
from halfbyte.formats import get_spec
from halfbyte.formats import quantise as definition
from halfbyte.kernels import Kernels

__all__ = ["Conversions", "dequantise_cases", "quantise_cases"]


@dataclass(frozen=True)
class Conversions:
    """Shapes (rows, columns) with the bytes of BF16 that their rotation should exceed (0: one buffer, which stays in the
    caches), the libraries to compare with, and the threads our kernels use."""

    shapes: Sequence[tuple[int, int, int]]
    libraries: Sequence[Library]
    threads: int


def quantise_cases(kernels: Kernels, plan: Conversions) -> Iterator[Case]:
    """One case a shape and baseline: BF16 in; codes, scales and the global scale out."""
    spec = get_spec("halfbyte")
    for rows, columns, budget in plan.shapes:
        inputs = _inputs(rows, columns, budget)
        baselines: dict[str, Callable[[Tensor], Any]] = {lib.name: lib.quantise for lib in plan.libraries}
        baselines["halfbyte reference"] = partial(definition, spec=spec)
        for name, baseline in baselines.items():
            yield Case(
                kernel="quantise",
                n=0,
                k=columns,
                m=rows,
                ours=[partial(kernels.quantise, x, spec) for x in inputs],
                baseline=name,
                theirs=[partial(baseline, x) for x in inputs[:4]],
                error=partial(_quantise_error, kernels, inputs[0]),
                facts=_facts(inputs),
                elements=rows * columns,
                threads=plan.threads,
            )


def dequantise_cases(kernels: Kernels, plan: Conversions) -> Iterator[Case]:
    """One case a shape and baseline: BF16 out, from codes that the same library made."""
    spec = get_spec("halfbyte")
    for rows, columns, budget in plan.shapes:
        inputs = _inputs(rows, columns, budget)
        codes = [kernels.quantise(x, spec) for x in inputs]
        baselines: dict[str, list[Callable[[], object]]] = {
            lib.name: [partial(lib.dequantise, lib.quantise(x)) for x in inputs[:4]] for lib in plan.libraries
        }
        baselines["halfbyte reference"] = [partial(by_definition, q, torch.bfloat16) for q in codes[:4]]
        for name, theirs in baselines.items():
            yield Case(
                kernel="dequantise",
                n=0,
                k=columns,
                m=rows,
                ours=[partial(kernels.dequantise, q, torch.bfloat16) for q in codes],
                baseline=name,
                theirs=theirs,
                error=partial(_dequantise_error, kernels, inputs[0]),
                facts=_facts(inputs),
                elements=rows * columns,
                threads=plan.threads,
            )


def _inputs(rows: int, columns: int, budget: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=generator).to(torch.bfloat16)
    return copies(x, x.nbytes, budget, x.clone)


def _facts(inputs: Sequence[Tensor]) -> dict[str, Any]:
    size = round(len(inputs) * inputs[0].nbytes / 2**20, 1)
    theirs = round(len(inputs[:4]) * inputs[0].nbytes / 2**20, 1)
    return {"working_set_mib": size, "baseline_working_set_mib": theirs}


def _quantise_error(kernels: Kernels, x: Tensor) -> float:
    spec = get_spec("halfbyte")
    return oracle.relative_error(oracle.values(kernels.quantise(x, spec)), oracle.values(definition(x, spec)))


def _dequantise_error(kernels: Kernels, x: Tensor) -> float:
    q = definition(x, get_spec("halfbyte"))
    return oracle.relative_error(kernels.dequantise(q, torch.bfloat16), oracle.values(q))
