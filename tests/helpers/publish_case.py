"""Publication from sharded weights, on the ranks that torchrun started: ``publish_case.py CHECKPOINT FOLDER BLOCK``. What differs
from one process that publishes the same weights raises; rank 0 writes what travelled."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import sharded_case
import torch
import torch.distributed as dist

from halfbyte.envs import make_env
from halfbyte.learner.sharded.group import Group
from halfbyte.models.trajectory import SamplingParams
from halfbyte.refit.publisher import Publisher, PublishOptions
from halfbyte.refit.store.memory import MemoryStore
from halfbyte.refit.subscriber import Subscriber
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request
from halfbyte.train.rank_rollouts import RankRollouts
from halfbyte.train.sharded_weights import ShardedWeightPath


def engine_of(learner: Any, tensors: dict[str, torch.Tensor]) -> Engine:
    return Engine(learner.arch, learner.rollout_precision, tensors, options=EngineOptions(kv_memory_mb=2))


def sampled(engine: Engine) -> list[Any]:
    request = Request((5, 6, 7), SamplingParams(max_tokens=8, ignore_eos=True), n=2, key=3)
    return [(t.response_ids.tolist(), t.logprobs.tolist()) for t in engine.generate([request])]


def main() -> None:
    torch.set_num_threads(1)
    checkpoint, folder, block = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    ranks = Group()
    learner = sharded_case.make_learner({"checkpoint": checkpoint, "global_update": "hysteretic"}, ranks)
    parameters = learner.parameters
    tensors = dict(parameters.published()) | parameters.published_scales()
    engine = engine_of(learner, tensors)
    rollouts = RankRollouts(engine, make_env("arithmetic:sort"), None, 32, tensors, ranks)  # type: ignore[arg-type]
    options = PublishOptions(read_back=False, skip_levels=0, block=block)
    path = ShardedWeightPath(folder / "refit", rollouts, learner, tensors, 0, options=options)
    sent: list[list[str]] = []
    real = path._changes

    def watched() -> dict[str, Any]:
        found = real()
        sent.append(sorted(found))
        return found

    path._changes = watched  # type: ignore[method-assign]
    reference = None
    if path._lead is not None:
        reference = Publisher(MemoryStore(), path._lead.publisher.run, options=options)
        reference.publish(tensors, version=0)
    for version, share in enumerate((0.02, 0.0, 0.3, 1.0), 1):
        generator = torch.Generator().manual_seed(version + 10 * ranks.rank)
        for master in parameters.masters.values():
            moved = torch.rand(master.shape, generator=generator) < share
            master.add_(torch.where(moved, torch.randn(master.shape, generator=generator), 0.0))
        parameters.refresh()
        path.publish(version)
        now = dict(parameters.published()) | parameters.published_scales()
        if reference is not None:
            assert path._lead is not None
            want = reference.publish(now, version=version)
            head = path._lead.publisher.head
            assert head.stamp == want.stamp, "the same weights have the same digest"
        assert sampled(engine) == sampled(engine_of(learner, now)), "every rank serves what was published"
        assert engine.version == version
    if reference is not None:
        assert path._lead is not None
        stores = [path._lead.store, reference.store]
        ours, theirs = ({e.key: store.get(e.key) for e in store.list("objects")} for store in stores)
        assert ours == theirs, "object by object, the bytes that one process publishes"
        target = {name: torch.zeros_like(tensor) for name, tensor in now.items()}
        from halfbyte.refit.adapters.arrays import ArraysTarget

        Subscriber(stores[0], ArraysTarget(target)).refit()
        assert all(torch.equal(target[name], tensor) for name, tensor in now.items())
    parts = ranks.exchange(json.dumps(sent).encode())
    if ranks.rank == 0:
        (folder / "sent.json").write_text(json.dumps([json.loads(part) for part in parts]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
