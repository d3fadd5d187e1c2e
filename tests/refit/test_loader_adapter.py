"""The loader adapter against engines that lay weights out in their own ways, each with its own ``load_weights``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.refit.adapters.loader import LoaderTarget, ModuleLoader
from halfbyte.refit.arrays import flat_bytes, info_of
from halfbyte.refit.errors import LayoutError, TargetError
from halfbyte.refit.patch import Change, Stamp, Update, patch_between

H, HEADS, KV, INNER, E, V = 8, 4, 2, 6, 3, 10  # hidden, query rows, key rows, intermediate, experts, vocabulary
Tensors = dict[str, torch.Tensor]


def checkpoint(seed: int = 0, dtype: torch.dtype = torch.bfloat16, tied: bool = True) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    out = {"embed.weight": make(V, H), "norm.weight": make(H)}
    out |= {f"attn.{p}_proj.weight": make(n, H) for p, n in (("q", HEADS), ("k", KV), ("v", KV))}
    for e in range(E):
        out |= {
            f"experts.{e}.gate.weight": make(INNER, H),
            f"experts.{e}.up.weight": make(INNER, H),
            f"experts.{e}.down.weight": make(H, INNER),
        }
    if not tied:
        out["head.weight"] = out["embed.weight"].clone()
    return out


class Engine(torch.nn.Module):
    """Fused qkv and gate_up, experts stacked in 3-D, down transposed, rank ``rank`` of ``ranks``, FP32 norms, a tied head."""

    def __init__(self, rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks

        def parameter(*shape: int, dtype: torch.dtype = dtype) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)

        self.embed = parameter(V + 6, H)  # padded, as vocabularies are
        self.head = self.embed
        self.norm = parameter(H, dtype=torch.float32)
        self.qkv = parameter((HEADS + 2 * KV) // ranks, H)
        self.gate_up = parameter(E, 2 * INNER // ranks, H)
        self.down = parameter(E, INNER // ranks, H)  # [E, INNER, H]: transposed
        self.loads = 0

    def part(self, rows: torch.Tensor) -> torch.Tensor:
        size = rows.shape[0] // self.ranks
        return rows[self.rank * size : (self.rank + 1) * size]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        for name, w in weights:
            if name in ("embed.weight", "head.weight"):
                self.embed.data[:V].copy_(w)
            elif name == "norm.weight":
                self.norm.data.copy_(w)
            elif name.startswith("attn."):
                begin, rows = {"q": (0, HEADS), "k": (HEADS, KV), "v": (HEADS + KV, KV)}[name[5]]
                at = begin // self.ranks
                self.qkv.data[at : at + rows // self.ranks].copy_(self.part(w))
            else:
                _, expert, kind, _ = name.split(".")
                if kind == "down":
                    self.down.data[int(expert)].copy_(self.part(w.t()))
                else:
                    at = (kind == "up") * INNER // self.ranks
                    self.gate_up.data[int(expert), at : at + INNER // self.ranks].copy_(self.part(w))


def loaded(make: Callable[[], Any], tensors: Tensors) -> Any:
    engine = make()
    engine.load_weights(tensors.items())
    return engine


def update(before: Tensors, after: Tensors, version: int = 1) -> Update:
    changes = []
    for name in after:
        old, new = flat_bytes(before[name]), flat_bytes(after[name])
        block = patch_between(old, new, before[name].element_size())
        if block is not None:
            info = info_of(name, after[name])
            changes.append(Change(info, info, (block,)))
    return Update(Stamp("r", version - 1, ""), Stamp("r", version, ""), tuple(changes))


def bits(engine: torch.nn.Module) -> dict[str, bytes]:
    return {name: flat_bytes(p).tobytes() for name, p in engine.named_parameters()}


def target_of(engine: Any, tensors: Tensors, **more: Any) -> LoaderTarget:
    return LoaderTarget(ModuleLoader(engine), {n: t.clone() for n, t in tensors.items()}, **more)


def changed(tensors: Tensors, seed: int, share: float) -> Tensors:
    """Bits flipped anywhere: sign flips, NaN payloads, infinities, -0 among them."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, tensor in tensors.items():
        data = np.array(flat_bytes(tensor)).view(np.uint16)
        at = rng.random(len(data)) < share
        data[at] ^= rng.choice(np.array([1, 2, 0x8000, 0x7F80, 0x7FC1, 0xFFFF], np.uint16), int(at.sum()))
        out[name] = torch.from_numpy(data.view(np.uint8)).view(torch.bfloat16).reshape(tensor.shape)
    if "head.weight" in out:
        out["head.weight"] = out["embed.weight"].clone()
    return out


@pytest.mark.parametrize("ranks", [1, 2])
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.02, 0.5, 1.0]), st.booleans())
@settings(max_examples=15, deadline=None)
def test_every_layout_ends_as_a_full_load_would(ranks: int, seed: int, share: float, tied: bool) -> None:
    before = checkpoint(tied=tied)
    after = changed(before, seed, share)
    for rank in range(ranks):
        engine = loaded(lambda rank=rank: Engine(rank, ranks), before)
        target = target_of(engine, before)
        old, change = bits(engine), update(before, after)
        target.stage(change)
        assert bits(engine) == old, "staging is invisible"
        target.commit(change)
        assert bits(engine) == bits(loaded(lambda rank=rank: Engine(rank, ranks), after))
        assert all(target.read(n).tobytes() == flat_bytes(after[n]).tobytes() for n in after)
        target.rollback(change)
        assert bits(engine) == old
        assert all(target.read(n).tobytes() == flat_bytes(before[n]).tobytes() for n in before)
        target.discard(change)


def test_a_nan_weight_is_a_value_and_not_a_mark() -> None:
    before = checkpoint()
    after = {n: t.clone() for n, t in before.items()}
    after["attn.k_proj.weight"][1, 2] = float("nan")
    after["embed.weight"][0, 0] = 0.0
    before["embed.weight"][0, 0] = -0.0
    engine = loaded(Engine, before)
    target, change = target_of(engine, before), update(before, after)
    target.stage(change)
    target.commit(change)
    assert bits(engine) == bits(loaded(Engine, after))
    assert torch.isnan(engine.qkv).sum() == 1


def test_only_changed_places_are_written() -> None:
    before = checkpoint()
    after = {n: t.clone() for n, t in before.items()}
    after["experts.1.up.weight"][2, 3] += 1
    engine = loaded(Engine, before)
    target, change = target_of(engine, before), update(before, after)
    target.stage(change)
    engine.embed.data[V:] = 7.0  # the engine's own padding, changed since
    target.commit(change)
    assert bool((engine.embed[V:] == 7.0).all())
    assert engine.gate_up[1, INNER + 2, 3] == after["experts.1.up.weight"][2, 3]


def test_an_update_costs_three_loads_however_many_tensors_it_has() -> None:
    before = checkpoint()
    engine = loaded(Engine, before)
    target = target_of(engine, before)
    start = engine.loads
    target.stage(update(before, changed(before, 1, 0.5)))
    assert engine.loads - start == 3


def test_an_engine_that_serves_something_else_is_refused() -> None:
    before = checkpoint()
    engine = loaded(Engine, before)
    engine.qkv.data[0, 0] += 1
    with pytest.raises(LayoutError, match="qkv"):
        target_of(engine, before)
    target = target_of(engine, before, check=False)
    after = {n: t.clone() for n, t in before.items()}
    after["attn.q_proj.weight"][1, 1] += 1
    with pytest.raises(TargetError, match="qkv"):
        target.stage(update(before, after))


class Quantising(Engine):
    """Scales what it loads by the largest value: a loader that mixes elements."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(
            (n, w if w.dim() == 1 else (w / w.abs().amax().clamp(min=1e-6)).to(w.dtype)) for n, w in weights
        )


class Forgetful(Engine):
    """Wrong for experts, silently, as a prepacked backend can be: a later load lands elsewhere."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((n, w.roll(1, 0) if self.loads > 2 and "down" in n else w) for n, w in list(weights))


@pytest.mark.parametrize("kind", [Quantising, Forgetful])
def test_vllm_cpu_a_loader_that_is_silently_wrong_is_found_before_the_pause(kind: type[Engine]) -> None:
    before = checkpoint()
    engine = loaded(kind, before)
    target = target_of(engine, before)
    old = bits(engine)
    after = {n: t.clone() for n, t in before.items()}
    after["experts.0.down.weight"][1, 1] = 9.0
    with pytest.raises(TargetError, match=r"beside the mask|place of its own"):
        target.stage(update(before, after))
    assert bits(engine) == old


def test_names_of_a_tie_that_disagree_are_refused() -> None:
    before = checkpoint(tied=False)
    after = {n: t.clone() for n, t in before.items()}
    after["embed.weight"][0, 0], after["head.weight"][0, 0] = 3.0, 4.0
    engine = loaded(Engine, before)
    target = target_of(engine, before)
    with pytest.raises(LayoutError, match="share a parameter"):
        target.stage(update(before, after))


def test_a_loader_that_fails_leaves_everything_as_it_was() -> None:
    before = checkpoint()
    engine = loaded(Engine, before)
    target, old = target_of(engine, before), bits(engine)
    storage = engine.qkv.data_ptr()

    def broken(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise KeyError("unexpected weight")

    engine.load_weights = broken
    with pytest.raises(TargetError, match="unexpected weight"):
        target.stage(update(before, changed(before, 3, 0.1)))
    assert engine.qkv.data_ptr() == storage
    assert bits(engine) == old


def test_changed_parameters_are_announced_after_commit_and_after_rollback() -> None:
    before = checkpoint()
    after = {n: t.clone() for n, t in before.items()}
    after["attn.v_proj.weight"][0, 0] += 1
    engine, seen = loaded(Engine, before), []
    target = LoaderTarget(ModuleLoader(engine, seen.append), {n: t.clone() for n, t in before.items()})
    change = update(before, after)
    target.stage(change)
    target.commit(change)
    target.rollback(change)
    assert seen == [["qkv"], ["qkv"]]
