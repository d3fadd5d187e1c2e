"""Engines that follow a store: publisher on one side, engine on the other, nothing between them but objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Tensors, assert_packed_alike, make_engine, published, samples, step

from halfbyte.errors import RefitError
from halfbyte.kernels import active
from halfbyte.models.precision import precision_from
from halfbyte.refit.adapters.loader import LoaderTarget, ModuleLoader
from halfbyte.refit.arrays import flat_bytes, infos_of
from halfbyte.refit.publisher import Publisher, PublishOptions
from halfbyte.refit.store import MemoryStore
from halfbyte.refit.subscriber import Subscriber
from halfbyte.rollout.fp4_target import Fp4EngineTarget, fp4_coordinates, fp4_infos
from halfbyte.rollout.refit_target import EngineTarget


def versions(tensors: Tensors, count: int, share: float = 0.03) -> list[Tensors]:
    out = [tensors]
    for n in range(count):
        out.append(step(out[-1], n, share))
    return out


def publisher(store: MemoryStore) -> Publisher:
    return Publisher(store, "r", options=PublishOptions(profile="max", anchor_every=3))


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_an_engine_follows_and_catches_up_to_the_bit(lag: int, family_folders: dict[str, Path]) -> None:
    folder = family_folders["qwen3_moe"]
    line = versions(published(folder), 5)
    store = MemoryStore()
    writer = publisher(store)
    first = writer.publish(line[0])
    engine = make_engine(folder, line[0])
    reader = Subscriber(store, EngineTarget(engine, line[0], stamp=first.stamp))
    for n, tensors in enumerate(line[1:], 1):
        writer.publish(tensors)
        if n % lag == 0:
            done = reader.refit()
            assert done is not None
            assert done.target.version == n == engine.version
            fresh = make_engine(folder, tensors)
            assert_packed_alike(engine.weights, fresh.weights)
            assert [s[:2] for s in samples(engine)] == [s[:2] for s in samples(fresh)]
    assert (reader.refit() is None) == (5 % lag == 0), "what is left is taken now"
    assert reader.refit() is None


def test_an_engine_follows_codes_and_a_version_costs_less_than_in_bf16(family_folders: dict[str, Path]) -> None:
    folder = family_folders["qwen3"]
    line = versions(published(folder), 4)
    precision = precision_from("w4a4kv4")
    engine = make_engine(folder, line[0])
    coordinates = [fp4_coordinates(engine.arch, precision, t, active()) for t in line]
    bf16, fp4 = MemoryStore(), MemoryStore()
    plain, coded = publisher(bf16), publisher(fp4)
    infos = fp4_infos(coordinates[0])
    first = coded.publish(coordinates[0], infos=infos)
    plain.publish(line[0])
    reader = Subscriber(fp4, Fp4EngineTarget(engine, coordinates[0], stamp=first.stamp))
    for tensors, codes in zip(line[1:], coordinates[1:]):
        small, large = coded.publish(codes, infos=infos), plain.publish(tensors)
        assert reader.refit() is not None
        assert_packed_alike(engine.weights, make_engine(folder, tensors).weights)
        assert small.payload_bytes < large.payload_bytes


def test_an_engine_that_fails_in_the_commit_serves_on_and_takes_the_next_attempt(
    family_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = family_folders["qwen3_moe"]
    line = versions(published(folder), 1)
    store = MemoryStore()
    writer = publisher(store)
    first = writer.publish(line[0])
    engine = make_engine(folder, line[0])
    reader = Subscriber(store, EngineTarget(engine, line[0], stamp=first.stamp))
    writer.publish(line[1])
    before, swap, calls = samples(engine), engine.swap, []

    def failing(weights: Any) -> None:
        calls.append(weights.version)
        swap(weights)
        if calls == [1]:
            raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine, "swap", failing)
    with pytest.raises(RefitError, match="the device is gone"):
        reader.refit()
    assert calls == [1, 0]
    assert samples(engine) == before
    assert reader.refit() is not None
    assert_packed_alike(engine.weights, make_engine(folder, line[1]).weights)


class Fused(torch.nn.Module):
    """q, k, v as one matrix, as a serving engine keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(12, 8, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, w in weights:
            at = "qkv".index(name) * 4
            self.qkv.data[at : at + 4].copy_(w)


def test_an_engine_with_its_own_loader_follows() -> None:
    torch.manual_seed(0)
    line = versions({name: torch.randn(4, 8).bfloat16() for name in "qkv"}, 3, share=0.2)
    store = MemoryStore()
    writer = publisher(store)
    first = writer.publish(line[0])
    engine = Fused()
    engine.load_weights(line[0].items())
    target = LoaderTarget(ModuleLoader(engine), {n: t.clone() for n, t in line[0].items()}, stamp=first.stamp)
    reader = Subscriber(store, target)
    for tensors in line[1:]:
        writer.publish(tensors)
        assert reader.refit() is not None
        assert torch.equal(engine.qkv, torch.cat([tensors[n] for n in "qkv"]))
        assert {n: target.read(n).tobytes() for n in infos_of(tensors)} == {
            n: flat_bytes(t).tobytes() for n, t in tensors.items()
        }
