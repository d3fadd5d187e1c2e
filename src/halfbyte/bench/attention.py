"""Cases of decode attention: an FP4 cache beside a BF16 one, and our BF16 beside torch's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from halfbyte.bench import oracle
from halfbyte.bench.buffers import copies
from halfbyte.bench.case import Case
from halfbyte.formats import get_spec
from halfbyte.kernels import Kernels
from halfbyte.kernels.kv import KvLayer

__all__ = ["Contexts", "attention_cases"]

PAGE = 16


@dataclass(frozen=True)
class Contexts:
    """Context lengths (multiples of 16), sequences, heads, and what a rotation over layers should exceed in bytes."""

    contexts: Sequence[int]
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    budget: int


def attention_cases(kernels: Kernels, plan: Contexts) -> Iterator[Case]:
    """Two cases a context: FP4 KV beside BF16 KV, and BF16 KV beside torch's on a contiguous BF16 cache."""
    scale = plan.head_dim**-0.5
    for context in plan.contexts:
        batch = _Batch(plan, context)
        q = torch.randn(plan.batch, plan.heads, plan.head_dim, generator=batch.generator)
        bf16, fp4 = batch.layers(kernels)
        ours, twin = _layers(fp4, plan.budget), _layers(bf16, plan.budget)
        facts = {
            "kv_heads": plan.kv_heads,
            "head_dim": plan.head_dim,
            "working_set_mib": round(sum(layer.nbytes for layer in ours) / 2**20, 1),
            "baseline_working_set_mib": round(sum(layer.nbytes for layer in twin) / 2**20, 1),
        }
        call = partial(_decode, kernels, q, batch, scale)
        yield Case(
            kernel="attention-fp4",
            n=plan.heads,
            k=context,
            m=plan.batch,
            ours=[partial(call, layer) for layer in ours],
            baseline="halfbyte bf16 kv",
            theirs=[partial(call, layer) for layer in twin],
            error=partial(_error, kernels, q, batch, scale, fp4),
            facts={**facts, "capacity_ratio": bf16.nbytes_per_token / fp4.nbytes_per_token},
        )
        contiguous = [batch.contiguous(layer) for layer in twin]
        rounded = q.to(torch.bfloat16).unsqueeze(2)
        yield Case(
            kernel="attention-bf16",
            n=plan.heads,
            k=context,
            m=plan.batch,
            ours=[partial(call, layer) for layer in twin],
            baseline="torch bf16 sdpa, contiguous",
            theirs=[partial(_sdpa, rounded, k, v, scale) for k, v in contiguous],
            error=partial(_error, kernels, q, batch, scale, bf16),
            facts={**facts, "working_set_mib": facts["baseline_working_set_mib"]},
        )


class _Batch:
    """Sequences of one length whose pages lie scattered, and their keys and values."""

    def __init__(self, plan: Contexts, context: int) -> None:
        self.plan, self.context = plan, context
        self.generator = torch.Generator().manual_seed(context)
        per = context // PAGE
        self.pages = torch.randperm(plan.batch * per, generator=self.generator).view(plan.batch, per)
        self.table = self.pages.to(torch.int32)
        self.starts = torch.arange(plan.batch + 1, dtype=torch.int32)
        self.lengths = torch.full((plan.batch,), context, dtype=torch.int32)

    def slots(self, sequence: int) -> Tensor:
        """Slots of a sequence's tokens, in order."""
        return (self.pages[sequence, :, None] * PAGE + torch.arange(PAGE)).flatten()

    def layers(self, kernels: Kernels) -> tuple[KvLayer, KvLayer]:
        """The same random keys and values stored as BF16 and as FP4."""
        plan = self.plan
        shape = (self.pages.numel(), PAGE, plan.kv_heads, plan.head_dim)
        pair = kernels.new_kv_layer(*shape, "bf16"), kernels.new_kv_layer(*shape, "fp4", get_spec("halfbyte_kv"))
        for sequence in range(plan.batch):
            k, v = torch.randn(2, self.context, plan.kv_heads, plan.head_dim, generator=self.generator)
            for layer in pair:
                kernels.store_kv(layer, k, v, self.slots(sequence))
        return pair

    def contiguous(self, layer: KvLayer) -> tuple[Tensor, Tensor]:
        """The tokens of a layer as torch likes them: keys and values [batch, kv heads, context, head_dim] BF16."""
        both = [layer.read(self.slots(s)) for s in range(self.plan.batch)]
        k, v = (torch.stack([pair[i].to(torch.bfloat16) for pair in both]) for i in (0, 1))
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()


def _layers(layer: KvLayer, budget: int) -> list[KvLayer]:
    def again() -> KvLayer:
        arrays = {name: getattr(layer, name) for name in ("k", "v", "k_scales", "v_scales")}
        return replace(layer, **{name: array.clone() for name, array in arrays.items() if array is not None})

    return copies(layer, layer.nbytes, budget, again)


def _decode(kernels: Kernels, q: Tensor, batch: _Batch, scale: float, layer: KvLayer) -> Tensor:
    return kernels.attention(q, layer, batch.table, batch.starts, batch.lengths, scale)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)


def _error(kernels: Kernels, q: Tensor, batch: _Batch, scale: float, layer: KvLayer) -> float:
    got = _decode(kernels, q, batch, scale, layer)
    exact = [oracle.attention(q[s], *layer.read(batch.slots(s)), scale) for s in range(batch.plan.batch)]
    return oracle.relative_error(got, torch.stack(exact))
