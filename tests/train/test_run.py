"""A whole run: its folder, exact resume after kill -9 anywhere, refusals that lose nothing."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_run import assert_same_run, metrics, small_config, spawn

from halfbyte.errors import CheckpointError, ConfigError, DataError, NumericsError
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.safetensors_io import SafetensorsFile, write_safetensors
from halfbyte.train import run
from halfbyte.train.run_folder import RunFolder
from halfbyte.train.state import latest_checkpoint

pytestmark = pytest.mark.usefixtures("torch_single_thread")


@pytest.fixture
def reference_run(policy_folder: Path, tmp_path: Path, reward_module: str) -> Path:
    out = tmp_path / "unbroken"
    assert run(small_config(policy_folder, out, f"{reward_module}:sevens")) == 0
    return out


def test_run_folder_is_complete_and_the_reward_rises(policy_folder: Path, tmp_path: Path, reward_module: str) -> None:
    out = tmp_path / "run"
    config = small_config(
        policy_folder,
        out,
        f"{reward_module}:sevens",
        train__steps=25,
        train__checkpoint_every=10,
        learner__schedule="constant",
    )
    assert run(config) == 0
    rows = metrics(out)
    rewards = [r["reward/mean"] for r in rows if r["kind"] == "train"]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.15
    k3 = [r["gap/k3_kl"] for r in rows if "gap/k3_kl" in r]
    assert len(k3) > 10
    assert max(k3) < 0.05
    summary = json.loads((out / "summary.json").read_text())
    needed = {
        "accuracy_before",
        "accuracy_after",
        "accuracy_interval",
        "steps",
        "wall_seconds",
        "rollout_seconds",
        "learner_seconds",
        "k3_kl",
        "mean_abs_gap",
        "seed",
    }
    assert needed <= summary.keys()
    assert summary["steps"] == 25
    environment = json.loads((out / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__.split("+")[0] or environment["versions"]["torch"]
    assert (out / "trajectories" / "step_000001.jsonl").exists()
    assert len(list((out / "checkpoints").iterdir())) == 2, "older checkpoints are removed"
    trained = load_checkpoint(out / "model")
    assert trained.architecture.n_experts == 4
    updates = np.cumsum([r.get("optim/updates", 0.0) for r in rows if r["kind"] == "train"])
    assert [r["version"] for r in rows if r["kind"] == "train"] == updates.tolist(), "one version for every update"


@pytest.mark.parametrize("attempt", range(3))
def test_kill_9_at_a_random_point_then_resume_gives_the_same_run(
    attempt: int, policy_folder: Path, tmp_path: Path, reward_module: str, reference_run: Path
) -> None:
    """Covers miles #2835 (version), ms-swift #9935 (random state), open-instruct #1627 (weights)."""
    out = tmp_path / "killed"
    config = small_config(policy_folder, out, f"{reward_module}:sevens")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_json()))
    process = spawn(path, "new")
    rng = random.Random(attempt)
    wanted = rng.randrange(0, 5)  # kill after this many lines of metrics, plus a moment
    deadline = time.monotonic() + 120
    while process.poll() is None and len(RunFolder(out).rows()) < wanted + 1:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(rng.random() * 0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if (out / "summary.json").exists():
        pytest.skip("finished before the kill")
    assert run(small_config(policy_folder, out, f"{reward_module}:sevens"), resume=True) == 0
    assert_same_run(reference_run, out)


def test_every_file_operation_can_be_the_last(
    policy_folder: Path, tmp_path: Path, reward_module: str, reference_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Die at each rename, in turn: what is on disk then resumes to the unbroken run's numbers."""
    from pathlib import Path as RealPath

    class Died(BaseException):
        pass

    out, attempts = tmp_path / "dying", 0
    real_rename, real_replace = RealPath.rename, RealPath.replace
    for fatal in range(1, 40):
        count = 0

        def dying(real: Any, fatal: int = fatal) -> Any:
            def call(self: Path, target: Path) -> Path:
                nonlocal count
                count += 1
                if count == fatal:
                    raise Died
                result: Path = real(self, target)
                return result

            return call

        monkeypatch.setattr(RealPath, "rename", dying(real_rename))
        monkeypatch.setattr(RealPath, "replace", dying(real_replace))
        started = (out / "config.json").exists()
        try:
            assert run(small_config(policy_folder, out, f"{reward_module}:sevens"), resume=started) == 0
        except Died:
            attempts += 1
            continue
        finally:
            monkeypatch.undo()
            monkeypatch.syspath_prepend(str(tmp_path))
        break
    assert attempts > 5
    assert_same_run(reference_run, out)


def test_ctrl_c_saves_and_resume_completes(
    policy_folder: Path, tmp_path: Path, reward_module: str, reference_run: Path
) -> None:
    out = tmp_path / "stopped"
    config = small_config(policy_folder, out, f"{reward_module}:sevens", train__checkpoint_every=0)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_json()))
    process = spawn(path, "new")
    deadline = time.monotonic() + 120
    while process.poll() is None and len(RunFolder(out).rows()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert process.wait() in (130, 0)
    assert latest_checkpoint(out / "checkpoints") is not None
    if not (out / "summary.json").exists():
        assert run(config, resume=True) == 0
    assert_same_run(reference_run, out)


def test_existing_run_is_never_mixed_with_another(policy_folder: Path, tmp_path: Path, reward_module: str) -> None:
    out = tmp_path / "run"
    config = small_config(policy_folder, out, f"{reward_module}:sevens", train__steps=1)
    assert run(config) == 0
    before = metrics(out)
    with pytest.raises(ConfigError, match="already holds a run"):
        run(config)
    other = small_config(policy_folder, out, f"{reward_module}:sevens", train__steps=1, learner__lr=1e-5)
    with pytest.raises(ConfigError, match=r"learner\.lr"):
        run(other, resume=True)
    assert metrics(out) == before
    (out / "mine.txt").write_text("keep me")
    assert run(other, overwrite=True) == 0
    assert (out / "mine.txt").read_text() == "keep me"
    with pytest.raises(ConfigError, match="no run to resume"):
        run(small_config(policy_folder, tmp_path / "nothing"), resume=True)


def test_a_reward_that_raises_fails_its_samples_not_the_run(
    policy_folder: Path, tmp_path: Path, reward_module: str
) -> None:
    out = tmp_path / "run"
    config = small_config(
        policy_folder, out, f"{reward_module}:sometimes_broken", train__steps=2, train__save_trajectories_every=1
    )
    assert run(config) == 0
    rows = metrics(out)
    assert any(r.get("reward/failed", 0) > 0 for r in rows)
    saved = [json.loads(line) for line in (out / "trajectories" / "step_000001.jsonl").read_text().splitlines()]
    failed = [t for t in saved if t["reward"] is None]
    assert any("the judge is down" in str(t["info"]) for t in failed)


def test_all_rewards_equal_changes_no_weight_and_no_version(policy_folder: Path, tmp_path: Path) -> None:
    """A random policy never sorts: all rewards 0 (TRL #7068, TRL #5937)."""
    out = tmp_path / "run"
    assert run(small_config(policy_folder, out, rollout__max_tokens=2)) == 0
    assert [r["version"] for r in metrics(out) if r["kind"] == "train"] == [0.0] * 4
    start, end = load_checkpoint(policy_folder), load_checkpoint(out / "model")
    for name, tensor in start.tensors.items():
        assert torch.equal(tensor.bfloat16(), end.tensors[name]), name


def test_group_of_one_warns_and_goes_on(
    policy_folder: Path, tmp_path: Path, reward_module: str, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(small_config(policy_folder, out, f"{reward_module}:sevens", rollout__samples_per_prompt=1)) == 0
    assert capfd.readouterr().err.count("groups have one valid sample") == 1


def test_overwrite_replaces_a_run_only_by_one_that_starts(
    policy_folder: Path, tmp_path: Path, reward_module: str
) -> None:
    out = tmp_path / "run"
    assert run(small_config(policy_folder, out, f"{reward_module}:sevens", train__steps=1)) == 0
    before = metrics(out)
    with pytest.raises(CheckpointError):
        run(small_config(tmp_path / "missing", out), overwrite=True)
    with pytest.raises(ConfigError):
        run(small_config(policy_folder, out, rollout__kv_memory_mb=0.0001), overwrite=True)
    assert metrics(out) == before
    assert latest_checkpoint(out / "checkpoints") is not None


def test_a_run_that_cannot_start_leaves_no_run_behind(policy_folder: Path, tmp_path: Path, reward_module: str) -> None:
    out = tmp_path / "run"
    with pytest.raises(ConfigError):
        run(small_config(policy_folder, out, f"{reward_module}:sevens", rollout__kv_memory_mb=0.0001))
    assert run(small_config(policy_folder, out, f"{reward_module}:sevens", train__steps=1)) == 0


def test_two_processes_cannot_write_to_one_run(policy_folder: Path, tmp_path: Path, reward_module: str) -> None:
    out = tmp_path / "run"
    with RunFolder(out).locked(), pytest.raises(ConfigError, match="another process"):
        run(small_config(policy_folder, out, f"{reward_module}:sevens"))


def test_trl_5937_an_update_that_publishes_nothing_keeps_the_version(
    policy_folder: Path, tmp_path: Path, reward_module: str
) -> None:
    out = tmp_path / "run"
    assert run(small_config(policy_folder, out, f"{reward_module}:sevens", learner__lr=1e-12)) == 0
    rows = [r for r in metrics(out) if r["kind"] == "train"]
    assert any(r.get("optim/updates", 0) > 0 for r in rows), "the masters were updated"
    assert [r["version"] for r in rows] == [0.0] * 4


def test_bad_prompt_of_a_finite_data_set_is_found_before_the_first_step(policy_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [json.dumps({"prompt": f"{i}=", "answer": str(i)}) for i in range(60)]
    path.write_text("\n".join([*lines, json.dumps({"prompt": "1" * 99, "answer": "1"})]))
    with pytest.raises(DataError, match="99 tokens"):
        run(small_config(policy_folder, tmp_path / "run", env__name=f"jsonl:{path}"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_reward_that_always_fails_says_so_once(
    policy_folder: Path, tmp_path: Path, reward_module: str, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(small_config(policy_folder, out, f"{reward_module}:always_broken")) == 0
    text = capfd.readouterr().err
    assert text.count("scoring failed for every sample") == 1
    assert "the judge is gone" in text
    assert json.loads((out / "summary.json").read_text())["mean_abs_gap"] is None


def broken_copy(policy: Path, to: Path) -> Path:
    import shutil

    shutil.copytree(policy, to)
    return to


def test_broken_models_are_refused_before_anything_is_written(policy_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(CheckpointError, match="no model folder"):
        run(small_config(tmp_path / "missing", out))
    truncated = broken_copy(policy_folder, tmp_path / "truncated")
    data = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match="cut short"):
        run(small_config(truncated, out))
    nan = broken_copy(policy_folder, tmp_path / "nan")
    tensors = {k: v.clone() for k, v in SafetensorsFile(nan / "model.safetensors").items()}
    tensors["model.norm.weight"][3] = float("nan")
    write_safetensors(nan / "model.safetensors", tensors, {"format": "pt"})
    with pytest.raises(NumericsError, match=r"model\.norm\.weight"):
        run(small_config(nan, out))
    unsupported = broken_copy(policy_folder, tmp_path / "unsupported")
    config = json.loads((unsupported / "config.json").read_text())
    config["architectures"], config["model_type"] = ["MambaForCausalLM"], "mamba"
    (unsupported / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="MambaForCausalLM"):
        run(small_config(unsupported, out))
    assert not (out / "metrics.jsonl").exists()


def test_tokenizer_of_another_model_and_empty_dataset_are_refused(policy_folder: Path, tmp_path: Path) -> None:
    wrong = broken_copy(policy_folder, tmp_path / "wrong")
    tokenizer = json.loads((wrong / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {**tokenizer["model"]["vocab"], "ω": 90}
    (wrong / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="embedding rows"):
        run(small_config(wrong, tmp_path / "run"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError):
        run(small_config(policy_folder, tmp_path / "run", env__name=f"jsonl:{tmp_path / 'empty.jsonl'}"))


def test_damaged_checkpoint_is_refused_by_name(policy_folder: Path, tmp_path: Path, reward_module: str) -> None:
    out = tmp_path / "run"
    config = small_config(policy_folder, out, f"{reward_module}:sevens", train__steps=2, learner__schedule="constant")
    run(config)
    path = latest_checkpoint(out / "checkpoints")
    assert path is not None
    data = (path / "optimiser.safetensors").read_bytes()
    (path / "optimiser.safetensors").write_bytes(data[: len(data) // 2])
    longer = small_config(policy_folder, out, f"{reward_module}:sevens", train__steps=3, learner__schedule="constant")
    with pytest.raises(CheckpointError, match="cut short"):
        run(longer, resume=True)
