"""Engines on tiny checkpoints, updates of their weights, and comparison of everything they packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import SamplingParams
from halfbyte.refit.arrays import flat_bytes, infos_of
from halfbyte.refit.patch import Change, Stamp, Update, patch_between
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request
from halfbyte.rollout.weights import RolloutWeights

Tensors = dict[str, torch.Tensor]


def published(folder: Path) -> Tensors:
    return {n: t.clone().bfloat16() for n, t in load_checkpoint(folder).tensors.items()}


def step(tensors: Tensors, seed: int, share: float, names: str = "") -> Tensors:
    """Some weights move by one BF16 step, as a small learning rate moves them."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in tensors.items():
        bits = tensor.view(torch.int16).clone()
        moved = torch.rand(bits.shape, generator=generator) < (share if names in name else 0)
        out[name] = torch.where(moved, bits ^ 1, bits).view(torch.bfloat16)
    return out


def update_of(before: Tensors, after: Tensors, version: int, infos: Any = None) -> Update:
    infos = infos or infos_of(after)
    changes = []
    for name in after:
        width = 1 if infos[name].dtype == "F4" else after[name].element_size()
        block = patch_between(flat_bytes(before[name]), flat_bytes(after[name]), width)
        if block is not None:
            changes.append(Change(infos[name], infos[name], (block,)))
    return Update(Stamp("r", version - 1, "a"), Stamp("r", version, "b"), tuple(changes))


def make_engine(folder: Path, tensors: Tensors, precision: Any = "w4a4kv4") -> Engine:
    arch = load_checkpoint(folder).architecture
    return Engine(arch, precision_from(precision), tensors, options=EngineOptions(kv_memory_mb=2))


def samples(engine: Engine) -> list[tuple[Any, ...]]:
    request = Request((5, 6, 7), SamplingParams(max_tokens=8, ignore_eos=True), n=2, key=3)
    return [(t.response_ids.tolist(), t.logprobs.tolist(), t.versions.tolist()) for t in engine.generate([request])]


def packed(weights: RolloutWeights) -> dict[Any, Any]:
    out: dict[Any, Any] = {"embed": weights.embedding}
    out |= weights.vectors
    for key, linear in weights.linears.items():
        q = linear.store.unpacked()
        out[key] = linear.store.dequantised() if q is None else (q.codes, q.scales, q.global_scale)
        out[key, "bias"] = torch.zeros(0) if linear.bias is None else linear.bias
    for key, experts in weights.experts.items():
        for store in (experts.gate_up, experts.down):
            q = store.unpacked()
            out[key, store is experts.down] = store.dequantised() if q is None else (q.codes, q.scales, q.global_scale)
    return out


def assert_packed_alike(a: RolloutWeights, b: RolloutWeights) -> None:
    left, right = packed(a), packed(b)
    assert left.keys() == right.keys()
    for key, value in left.items():
        pairs = zip(value, right[key]) if isinstance(value, tuple) else [(value, right[key])]
        assert all(torch.equal(x, y) for x, y in pairs), key
