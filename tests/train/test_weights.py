"""Weight updates of a run: what the store holds, how a run that goes on finds it, what a follower gets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_run import small_config

from halfbyte.errors import ConfigError, NumericsError
from halfbyte.formats import get_spec
from halfbyte.formats.shared import quantise_shared
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.safetensors_io import SafetensorsFile
from halfbyte.refit.adapters.folder import FolderTarget
from halfbyte.refit.head import read_head
from halfbyte.refit.store import FilesystemStore
from halfbyte.refit.subscriber import Subscriber
from halfbyte.refit.verify import verify_store
from halfbyte.train import run
from halfbyte.train.run_folder import RunFolder
from halfbyte.train.weights import WeightPath

pytestmark = pytest.mark.usefixtures("torch_single_thread")


def config(policy_folder: Path, out: Path, reward_module: str, **sets: Any) -> Any:
    sets = {"learner__schedule": "constant", "train__steps": 4, "train__checkpoint_every": 2} | sets
    return small_config(policy_folder, out, f"{reward_module}:sevens", **sets)


def train_rows(out: Path) -> list[dict[str, Any]]:
    rows = [r for r in RunFolder(out).rows() if r["kind"] == "train"]
    return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in rows]


def followed(store: Path, folder: Path) -> dict[str, torch.Tensor]:
    target = FolderTarget(folder)
    Subscriber(FilesystemStore(store), target).refit()
    return dict(SafetensorsFile(target.current / "model.safetensors"))


def test_a_follower_of_the_run_gets_the_trained_weights(
    policy_folder: Path, tmp_path: Path, reward_module: str
) -> None:
    out = tmp_path / "run"
    assert run(config(policy_folder, out, reward_module)) == 0
    report = verify_store(FilesystemStore(out / "refit"))
    assert report.good
    rows = train_rows(out)
    versions = [edge.edge.version for edge in report.ways if edge.edge.kind in ("full", "delta")]
    assert sorted(set(versions)) == list(range(int(rows[-1]["version"]) + 1)), "every update is a version"
    served = followed(out / "refit", tmp_path / "served")
    trained = SafetensorsFile(out / "model" / "model.safetensors")
    assert served.keys() == set(trained)
    assert all(torch.equal(served[name], trained[name]) for name in served)
    updates = [r for r in rows if "refit/changed" in r]
    assert len(updates) == int(rows[-1]["version"])
    for row in updates:
        assert 0 < row["refit/changed"] <= 1
        assert 0 < row["refit/bytes"] <= row["refit/full_bytes"]
        assert 0 <= row["refit/changed_codes"] < row["refit/changed"]
        assert row["refit/avalanches"] <= 5, "a power-of-two scale moves now and then"
    assert {"time/encode", "time/store", "time/stage", "time/pause"} <= RunFolder(out).rows()[1].keys()


def test_changed_shares_are_those_of_the_versions(policy_folder: Path, tmp_path: Path, reward_module: str) -> None:
    from halfbyte.bench.refit import run_versions

    out = tmp_path / "run"
    assert run(config(policy_folder, out, reward_module)) == 0
    found = [float((a != b).mean()) for a, b in run_versions(out / "refit")]
    assert [r["refit/changed"] for r in train_rows(out) if "refit/changed" in r] == pytest.approx(found)


@pytest.mark.parametrize("damage", ["none", "missing", "torn", "foreign"])
def test_a_resumed_run_goes_on_in_its_store_or_makes_it_again(
    damage: str, policy_folder: Path, tmp_path: Path, reward_module: str
) -> None:
    """The checkpoint is of step 2, the store has gone on to step 3 or 4: what came after the checkpoint is taken back."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert run(config(policy_folder, whole, reward_module)) == 0
    shutil.copytree(whole, out)
    for step in (out / "checkpoints").iterdir():
        if step.name != "step_000002":
            shutil.rmtree(step)
    store = out / "refit"
    run_before = read_head(FilesystemStore(store))
    assert run_before is not None
    if damage == "missing":
        shutil.rmtree(store)
    elif damage == "torn":
        for path in (store / "objects").rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes()[:-3])
    elif damage == "foreign":
        other = tmp_path / "other"
        assert run(config(policy_folder, other, reward_module, train__seed=5)) == 0
        shutil.rmtree(store)
        shutil.copytree(other / "refit", store)
    assert run(config(policy_folder, out, reward_module), resume=True) == 0
    assert train_rows(out) == train_rows(whole)
    assert verify_store(FilesystemStore(store)).good
    served, expected = followed(store, tmp_path / "served"), followed(whole / "refit", tmp_path / "expected")
    assert all(torch.equal(served[name], expected[name]) for name in expected)
    run_after = read_head(FilesystemStore(store))
    assert run_after is not None
    assert (run_after[0].run == run_before[0].run) == (damage == "none")


def test_scales_that_outlive_versions_survive_a_resume(policy_folder: Path, tmp_path: Path, reward_module: str) -> None:
    spec = {"precision": {"preset": "w4a4kv4", "weight_spec": "halfbyte_frozen"}}
    whole, out = tmp_path / "whole", tmp_path / "run"
    sets = {"precision": spec["precision"], "learner__lr": 3e-2}
    assert run(config(policy_folder, whole, reward_module, **sets)) == 0
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / "step_000004")
    assert run(config(policy_folder, out, reward_module, **sets), resume=True) == 0
    assert train_rows(out) == train_rows(whole)
    k3 = [r["gap/k3_kl"] for r in train_rows(whole) if "gap/k3_kl" in r]
    assert max(k3) < 0.05, "learner and rollout quantise alike"
    assert all(r["refit/avalanches"] == 0 for r in train_rows(whole) if "refit/avalanches" in r)
    names = SafetensorsFile(whole / "checkpoints" / "step_000004" / "scales.safetensors")
    assert len(names) > 4
    assert followed(whole / "refit", tmp_path / "served").keys() > {f"{n}.global_scale" for n in names}


def test_an_engine_that_refuses_an_update_keeps_its_version_and_the_run_its_checkpoint(
    policy_folder: Path, tmp_path: Path, reward_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert run(config(policy_folder, whole, reward_module)) == 0
    publish, seen = WeightPath.publish, []

    def failing(self: WeightPath, version: int) -> dict[str, float]:
        if version == 3:
            target = self.rollouts.target  # type: ignore[attr-defined]
            seen.append((self.rollouts.version, self.rollouts.weights))
            stage = target.stage
            target.stage = lambda update: (_ for _ in ()).throw(NumericsError("no", where="here"))
            try:
                return publish(self, version)
            finally:
                target.stage = stage
                seen.append((self.rollouts.version, self.rollouts.weights))
        return publish(self, version)

    monkeypatch.setattr(WeightPath, "publish", failing)
    with pytest.raises(NumericsError):
        run(config(policy_folder, out, reward_module))
    assert seen[0] == seen[1]
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run(config(policy_folder, out, reward_module), resume=True) == 0
    assert train_rows(out) == train_rows(whole)


def test_overwriting_a_run_begins_a_new_store(policy_folder: Path, tmp_path: Path, reward_module: str) -> None:
    out = tmp_path / "run"
    assert run(config(policy_folder, out, reward_module)) == 0
    before = read_head(FilesystemStore(out / "refit"))
    assert run(config(policy_folder, out, reward_module, train__seed=9), overwrite=True) == 0
    after = read_head(FilesystemStore(out / "refit"))
    assert before is not None
    assert after is not None
    assert before[0].run != after[0].run
    assert json.loads((out / "summary.json").read_text())["weight_version"] == after[0].version
    assert np.isfinite(train_rows(out)[0]["refit/changed"])


@pytest.mark.parametrize("coordinates", ["w4a4kv4", None])
def test_updates_of_a_bf16_rollout_are_counted_in_fp4_coordinates(
    coordinates: str | None, policy_folder: Path, tmp_path: Path, reward_module: str
) -> None:
    """Against codes and scales of the first and the second version, quantised matrix by matrix by the reference."""
    out = tmp_path / "run"
    sets = {"precision": "bf16", "train__steps": 1, "train__delta_precision": coordinates}
    assert run(config(policy_folder, out, reward_module, **sets)) == 0
    row = train_rows(out)[-1]
    if coordinates is None:
        assert "refit/changed_codes" not in row
        return
    before, after = (load_checkpoint(path).tensors for path in (policy_folder, out / "model"))
    spec = get_spec("halfbyte")
    groups = [
        [name] for name in before if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"))
    ]
    groups += [
        [name, name.replace("gate_proj", "up_proj")] for name in before if "experts" in name and "gate_proj" in name
    ]
    groups += [[name] for name in before if "experts" in name and "down_proj" in name]
    codes = scales = changed_codes = changed_scales = 0
    for group in groups:
        old, new = (quantise_shared([t[n].bfloat16() for n in group], spec) for t in (before, after))
        for a, b in zip(old, new):
            difference = a.codes ^ b.codes
            changed_codes += int((difference & 15 != 0).sum() + (difference > 15).sum())
            changed_scales += int((a.scales.view(torch.uint8) != b.scales.view(torch.uint8)).sum())
            codes, scales = codes + 2 * difference.numel(), scales + a.scales.numel()
    assert changed_codes > 100
    assert row["refit/changed_codes"] == pytest.approx(changed_codes / codes, rel=1e-12)
    assert row["refit/changed_scales"] == pytest.approx(changed_scales / scales, rel=1e-12)


def test_an_unknown_precision_to_count_in_is_refused(policy_folder: Path, tmp_path: Path, reward_module: str) -> None:
    with pytest.raises(ConfigError, match="unknown precision 'w9'"):
        run(config(policy_folder, tmp_path / "run", reward_module, precision="bf16", train__delta_precision="w9"))
