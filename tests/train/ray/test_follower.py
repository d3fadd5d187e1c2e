"""A worker's weights: those of the version asked for, to the bit, from wherever it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from halfbyte.errors import RefitError
from halfbyte.models.open_model import open_model
from halfbyte.models.precision import PRESETS
from halfbyte.models.trajectory import SamplingParams
from halfbyte.refit.errors import RewoundError
from halfbyte.refit.publisher import Publisher, PublishOptions
from halfbyte.refit.store import FilesystemStore, HttpStore, MemoryStore
from halfbyte.refit.store.server import StoreServer
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request
from halfbyte.train.ray.follower import Follower

OPTIONS = EngineOptions(kv_memory_mb=2.0, max_length=48)


@pytest.fixture(scope="module")
def versions() -> list[dict[str, Tensor]]:
    """The shipped policy and two updates of it."""
    first = {name: tensor.to(torch.bfloat16) for name, tensor in open_model("tiny")[0].tensors.items()}
    out = [first]
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        out.append(
            {
                n: (t.float() * (1 + 0.02 * torch.randn(t.shape, generator=generator))).to(torch.bfloat16)
                for n, t in out[-1].items()
            }
        )
    return out


def make_engine(tensors: dict[str, Tensor], version: int) -> Engine:
    arch = open_model("tiny")[0].architecture
    return Engine(arch, PRESETS["w4a4kv4"], tensors, options=OPTIONS, version=version)


def sampled(engine: Engine) -> list[tuple[list[int], list[float], list[int]]]:
    requests = [Request((5, 6, 7 + i), SamplingParams(max_tokens=12), n=3, key=i, group=i) for i in range(4)]
    return [(t.response_ids.tolist(), t.logprobs.tolist(), t.versions.tolist()) for t in engine.generate(requests)]


def test_a_follower_serves_each_version_as_a_fresh_engine_would(versions: list[dict[str, Tensor]]) -> None:
    store = MemoryStore()
    publisher = Publisher(store, "run", options=PublishOptions(skip_levels=0))
    publisher.publish(versions[0], version=0)
    early = Follower(store, "early", make_engine)
    drawn = [sampled(early.engine)]
    for number in (1, 2):
        publisher.publish(versions[number], version=number)
        early.reach(number)
        drawn.append(sampled(early.engine))
        late = Follower(store, f"late-{number}", make_engine)  # has not seen what came before
        assert late.version == number
        assert sampled(late.engine) == drawn[-1]
    for number, tensors in enumerate(versions):
        assert sampled(make_engine(tensors, number)) == drawn[number]
    assert drawn[0] != drawn[1] != drawn[2]
    assert early.cost.refits == 2
    early.reach(1)  # an older bundle, given out again: the engine does not go back
    assert early.version == 2


def test_a_version_that_shows_late_is_waited_for_and_one_that_never_comes_is_said(
    versions: list[dict[str, Tensor]],
) -> None:
    store, now = MemoryStore(), [0.0]
    publisher = Publisher(store, "run", options=PublishOptions(skip_levels=0))
    publisher.publish(versions[0], version=0)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if 5 < now[0] < 6 + seconds and publisher.head.version == 0:
            publisher.publish(versions[1], version=1)

    follower = Follower(store, "late", make_engine, clock=lambda: now[0], sleep=sleep)
    follower.reach(1, patience=60.0)
    assert follower.version == 1
    assert 5 < now[0] < 10
    with pytest.raises(RewoundError, match="version 2 is not in the store"):
        follower.reach(2, patience=60.0)
    assert follower.version == 1
    with pytest.raises(RefitError, match="empty"):
        Follower(MemoryStore(), "nothing", make_engine)


def test_a_follower_over_http_needs_the_secret(versions: list[dict[str, Tensor]], tmp_path: Path) -> None:
    folder = FilesystemStore(tmp_path)
    Publisher(folder, "run").publish(versions[0], version=0)
    with StoreServer(folder) as server:
        follower = Follower(HttpStore(server.address, headers=server.headers), "far", make_engine)
        assert sampled(follower.engine) == sampled(make_engine(versions[0], 0))
        assert server.bytes_sent >= follower.cost.fetched_bytes
        with pytest.raises(RefitError, match="401"):
            Follower(HttpStore(server.address), "stranger", make_engine)
