"""``halfbyte bench kernels``: groups of cases, which of them run, and their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from halfbyte.bench.attention import Contexts, attention_cases
from halfbyte.bench.buffers import rotation_bytes
from halfbyte.bench.case import Case, KernelRow, measure
from halfbyte.bench.experts import Routed, expert_cases
from halfbyte.bench.guidance import guidance_cases
from halfbyte.bench.libraries import Library
from halfbyte.bench.linear import Products, linear_cases
from halfbyte.bench.machine import kernel_threads
from halfbyte.bench.quantise import Conversions, dequantise_cases, quantise_cases
from halfbyte.errors import ConfigError
from halfbyte.kernels import Kernels

__all__ = ["GROUPS", "Plan", "choose", "full_plan", "quick_plan", "run"]


@dataclass(frozen=True)
class Plan:
    """What is measured, and for how long."""

    products: Products
    twins: Products
    routed: Routed
    contexts: Sequence[Contexts]
    conversions: Conversions
    repeats: int
    minimum: float = 0.004
    limit: float = 4.0


def full_plan(libraries: Sequence[Library], repeats: int = 15) -> Plan:
    """The shapes of docs/benchmarks.md; minutes."""
    budget = rotation_bytes()
    tokens = (1, 2, 4, 8, 16, 32, 64)
    shapes = ((16384, 4096), (4096, 4096), (768, 2048))
    return Plan(
        Products(shapes, tokens, budget),
        Products(shapes[1:], (1, 8, 64), budget),
        Routed(64, 8, 2048, 768, tokens, budget),
        [
            Contexts((4096, 8192, 16384, 32768), 8, 16, 8, 128, budget),  # Qwen3-0.6B, Qwen3-1.7B
            Contexts((4096, 32768), 8, 32, 8, 128, budget),  # Llama-3.1-8B, Qwen3-8B
            Contexts((4096, 32768), 8, 32, 4, 128, budget),  # Qwen3-30B-A3B
        ],
        Conversions(((256, 2048, 0), (4096, 4096, budget)), libraries, kernel_threads()),
        repeats,
    )


def quick_plan(libraries: Sequence[Library], repeats: int = 5) -> Plan:
    """A look: small shapes, few tokens, rotations of 64 MiB; seconds."""
    budget, tokens = 64 * 2**20, (1, 8, 64)
    return Plan(
        Products(((4096, 4096), (768, 2048)), tokens, budget),
        Products(((768, 2048),), tokens, budget),
        Routed(16, 8, 1024, 384, tokens, budget),
        [Contexts((4096,), 8, 16, 8, 128, budget)],
        Conversions(((256, 2048, 0),), libraries, kernel_threads()),
        repeats,
        limit=1.0,
    )


GROUPS: Mapping[str, Callable[[Kernels, Plan], Iterator[Case]]] = MappingProxyType(
    {
        "linear": lambda kernels, plan: linear_cases(kernels, "w4a4", plan.products),
        "w4a16": lambda kernels, plan: linear_cases(kernels, "w4a16", plan.products),
        "bf16": lambda kernels, plan: linear_cases(kernels, "bf16", plan.twins),
        "experts": lambda kernels, plan: expert_cases(kernels, plan.routed),
        "attention": lambda kernels, plan: chain.from_iterable(attention_cases(kernels, c) for c in plan.contexts),
        "quantise": lambda kernels, plan: quantise_cases(kernels, plan.conversions),
        "dequantise": lambda kernels, plan: dequantise_cases(kernels, plan.conversions),
        "guidance": lambda kernels, plan: guidance_cases(kernels, plan.conversions, plan.routed),
    }
)


def choose(only: str) -> list[str]:
    """The groups that a comma-separated list names, in house order; all for an empty one.

    Raises:
        ConfigError: a name that is no group.
    """
    asked = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in asked if name not in GROUPS]
    if unknown:
        raise ConfigError(
            f"there are no kernels named {', '.join(unknown)}", where="--only", expected=f"some of {', '.join(GROUPS)}"
        )
    return [name for name in GROUPS if not asked or name in asked]


def run(kernels: Kernels, plan: Plan, groups: Sequence[str]) -> Iterator[KernelRow]:
    """The rows, one by one as they are measured."""
    for group in groups:
        for case in GROUPS[group](kernels, plan):
            yield measure(case, repeats=plan.repeats, minimum=plan.minimum, limit=plan.limit)
