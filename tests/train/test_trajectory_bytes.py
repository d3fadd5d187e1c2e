"""Trajectories between ranks: what arrives is what was sent."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np

from halfbyte.models.trajectory import GuidanceRows, Trajectory
from halfbyte.train.trajectory_bytes import pack_trajectories, unpack_trajectories


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, GuidanceRows):
        return isinstance(b, GuidanceRows) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def sampled(folder: Path) -> list[Trajectory]:
    """With routes, guidance, kept tokens, an error's text and no reward."""
    from halfbyte.guidance.plan import make_plan
    from halfbyte.models.checkpoint import load_checkpoint
    from halfbyte.models.precision import precision_from
    from halfbyte.models.trajectory import SamplingParams
    from halfbyte.rollout.engine import Engine, EngineOptions
    from halfbyte.rollout.request import Request

    checkpoint, precision = load_checkpoint(folder), precision_from("w4a4kv4")
    engine = Engine(
        checkpoint.architecture,
        precision,
        checkpoint.tensors,
        options=EngineOptions(kv_memory_mb=2),
        guidance=make_plan(checkpoint.architecture, precision),
    )
    sampling = SamplingParams(max_tokens=5, top_k=7)
    out = engine.generate([Request((5, 6, 7), sampling, n=3, key=4)])
    out[0].reward, out[1].info = 1.25, {"error": "lone \ud800 surrogate", "correct": False}
    out[2].turns = (0, 2)
    return out


def test_what_arrives_is_what_was_sent(family_folders: dict[str, Path]) -> None:
    sent = sampled(family_folders["qwen3_moe"])
    assert sent[0].guidance is not None
    assert sent[0].routes is not None
    assert sent[0].supports is not None
    found = unpack_trajectories(pack_trajectories(sent), sent[0].sampling, sent[0].precision)
    assert len(found) == len(sent)
    for a, b in zip(sent, found):
        for f in fields(Trajectory):
            assert same(getattr(a, f.name), getattr(b, f.name)), f.name
        b.logprobs[0] = 0.0  # an array of its own, which may be written to
    assert unpack_trajectories(pack_trajectories([]), sent[0].sampling, sent[0].precision) == []
