"""Trajectories in a file: to the bit, or refused."""

from __future__ import annotations

import random
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfbyte.envs import make_env
from halfbyte.errors import CheckpointError
from halfbyte.guidance.plan import make_plan
from halfbyte.models.open_model import open_model
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import GuidanceRows, SamplingParams, Trajectory
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.train.collect import collect
from halfbyte.train.trajectory_file import read_trajectories, write_trajectories


@pytest.fixture(scope="module")
def batches() -> dict[int, list[Trajectory]]:
    """Of several turns, filtered, with routes and guidance by two plans, and some without."""
    checkpoint, tokenizer = open_model("tiny")
    arch, precision = checkpoint.architecture, precision_from("w4a4kv4")
    out: dict[int, list[Trajectory]] = {}
    for number, (env, layers, sampling) in enumerate(
        (
            ("agent:guess", "all", SamplingParams(max_tokens=5, top_k=7, stop=("=",))),
            ("arithmetic:sort", "1", SamplingParams(max_tokens=9, stop_ids=(3, 4))),
            ("arithmetic:sort", None, SamplingParams(max_tokens=4, temperature=0.5)),
        )
    ):
        plan = None if layers is None else make_plan(arch, precision, sites=("expert_in", "k"), layers=layers, bits=1)
        engine = Engine(
            arch,
            precision,
            checkpoint.tensors,
            detokeniser=tokenizer,
            options=EngineOptions(kv_memory_mb=4),
            guidance=plan,
        )
        made = make_env(env)
        prompts = [made.prompt("train", i) for i in range(3)]
        out[number + 4] = collect(engine, made, tokenizer, prompts, sampling, samples=2, key=("x", number))
    out[4][1].reward, out[4][1].info = (
        None,
        {"error": "Zeile\n\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")},
    )
    out[5][0] = replace(out[5][0], routes=None, guidance=None)
    return out


def assert_same(a: Any, b: Any) -> None:
    for field in fields(a):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            assert left.shape == right.shape
            assert left.tobytes() == right.tobytes()
        elif isinstance(left, GuidanceRows):
            assert_same(left, right)
        elif field.name == "supports" and left is not None:
            assert [None if s is None else s.tolist() for s in left] == [
                None if s is None else s.tolist() for s in right
            ]
        else:
            assert left == right, field.name


def test_what_is_read_is_what_was_written(batches: dict[int, list[Trajectory]], tmp_path: Path) -> None:
    assert any(len(t.turns) > 1 for t in batches[4])
    assert any(t.supports for t in batches[4])
    assert len({t.guidance.layout for b in batches.values() for t in b if t.guidance is not None}) == 2
    write_trajectories(tmp_path / "b", batches)
    found = read_trajectories(tmp_path / "b")
    assert list(found) == list(batches)
    for number, batch in batches.items():
        assert len(found[number]) == len(batch)
        for a, b in zip(batch, found[number]):
            assert_same(a, b)
    write_trajectories(tmp_path / "again", found)
    for kind in ("json", "safetensors"):
        assert (tmp_path / f"again.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


def test_any_damage_is_refused(batches: dict[int, list[Trajectory]], tmp_path: Path) -> None:
    write_trajectories(tmp_path / "b", batches)
    tensors, text = tmp_path / "b.safetensors", tmp_path / "b.json"
    whole = tensors.read_bytes()
    rng = random.Random(0)
    for _ in range(60):
        at = rng.randrange(len(whole))
        tensors.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match="unreadable trajectories"):
            read_trajectories(tmp_path / "b")
    for cut in (b"", whole[:-1], whole[: len(whole) // 2]):
        tensors.write_bytes(cut)
        with pytest.raises(CheckpointError):
            read_trajectories(tmp_path / "b")
    tensors.write_bytes(whole)
    line = text.read_text()
    for damaged in (
        line[:-1],
        line.replace('"version": 1', '"version": 9'),
        re.sub(r'"response": (\d)', r'"response": 1\1', line, count=1),
        line.replace('"reward": 0.0', '"reward": 1.0', 1),
        line.replace('"group": 0', '"group": 1', 1),
        "[]",
    ):
        assert damaged != line
        text.write_text(damaged)
        with pytest.raises(CheckpointError, match="unreadable trajectories"):
            read_trajectories(tmp_path / "b")


def test_files_of_two_writings_are_not_taken_together(batches: dict[int, list[Trajectory]], tmp_path: Path) -> None:
    write_trajectories(tmp_path / "a", batches)
    write_trajectories(tmp_path / "b", {4: batches[4]})
    shutil.copy(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="not the file that was written with it"):
        read_trajectories(tmp_path / "b")
