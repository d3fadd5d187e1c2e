"""The A/A pilot, the plan that uses its noise, and what a lock holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from trial_case import lines, make_tasks, steps, trial, two_servers, url_trial, write_trial

from halfbyte.models.open_model import model_folder
from halfbyte.trial.folder import TrialFolder
from halfbyte.trial.lock import changes, genesis, make_lock, read_lock
from halfbyte.trial.pilot import noise_of

N = 24


def test_the_pilot_asks_the_baseline_alone(tmp_path: Path) -> None:
    with url_trial(tmp_path, N) as (folder, first, second):
        assert trial("pilot", folder) == 0
        assert second.bodies == []
        assert len(first.bodies) == 2 * N + 1  # both copies, and one to warm up
    records = lines(tmp_path / "pilot.jsonl")
    assert {record["phase"] for record in records} == {"pilot"}
    assert noise_of(TrialFolder.open(tmp_path)) == 0.0  # greedy: the same seed, the same answer


def test_random_sampling_shows_its_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At temperature 1 the copies get other seeds; a baseline that passes half of the time flips half of the time."""
    with url_trial(tmp_path, 60, baseline={"passing": 0.5}, sampling={"temperature": 1.0}) as (folder, first, _):
        assert trial("pilot", folder) == 0
        seeds = {
            arm: {r["seed"] for r in lines(folder / "pilot.jsonl") if r["arm"] == arm}
            for arm in ("baseline", "candidate")
        }
        assert not seeds["baseline"] & seeds["candidate"]
        noise = noise_of(TrialFolder.open(folder))
        assert noise is not None
        right = {
            (body["messages"][0]["content"], body["seed"]): first.right(body["messages"][0]["content"], body["seed"])
            for body in first.bodies
        }
        texts = {text for text, _ in right if "question" in text}
        flips = sum(len({ok for (said, _), ok in right.items() if said == text}) == 2 for text in texts)
        assert noise == flips / 60
        capsys.readouterr()
        assert trial("plan", folder, "--json") == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["noise"] == noise
        assert plan["noise_measured"] is True
        assert trial("plan", folder, "--noise", "0", "--json") == 0
        assert json.loads(capsys.readouterr().out)["tasks"] < plan["tasks"]


def test_a_pilot_of_other_settings_counts_for_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with url_trial(tmp_path, N) as (folder, *_):
        assert trial("pilot", folder) == 0
        text = (folder / "trial.toml").read_text()
        (folder / "trial.toml").write_text(text.replace("max_tokens = 16", "max_tokens = 17"))
        assert noise_of(TrialFolder.open(folder)) is None
        assert trial("pilot", folder) == 4
        assert "--again" in capsys.readouterr().err
        assert trial("pilot", folder, "--again") == 0
        (folder / "trial.toml").write_text(
            text.replace("max_tokens = 16", "max_tokens = 17").replace("margin = 0.1", "margin = 0.2")
        )
        assert noise_of(TrialFolder.open(folder)) == 0.0  # limits may still be chosen
        assert steps(folder, "check", "lock") == [0, 0]
        assert trial("pilot", folder, "--again") == 3  # it is part of what was locked


def test_a_plan_without_a_pilot_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trial(tmp_path, {"url": "http://127.0.0.1:9/v1"}, {"url": "http://127.0.0.1:9/v1"}, make_tasks(4))
    assert trial("plan", tmp_path) == 0
    said = capsys.readouterr().out
    assert "no pilot yet" in said
    assert "short" in said


def test_a_tampered_pilot_is_noticed(tmp_path: Path) -> None:
    with url_trial(tmp_path, N) as (folder, *_):
        assert steps(folder, "pilot", "check", "lock") == [0, 0, 0]
        assert trial("run", folder) in (1, 2)
    path = tmp_path / "pilot.jsonl"
    path.write_text(path.read_text().replace('"passed":true', '"passed":false', 1))
    assert trial("verify", tmp_path) == 3


def test_a_lock_names_what_differs(tmp_path: Path) -> None:
    with two_servers(4) as (first, second):
        targets = {"url": first.url}, {"url": second.url}
        folder = TrialFolder.open(write_trial(tmp_path, *targets, make_tasks(4)))
        lock = make_lock(folder)
        assert changes(lock, folder) == []
        assert read_lock(folder) == json.loads(json.dumps(lock))
        other = TrialFolder.open(write_trial(tmp_path, targets[0], targets[0], make_tasks(5), cost={"currency": "EUR"}))
        assert changes(lock, other) == ["[candidate]", "[cost]", "tasks t004"]
        again = make_lock(other, again=True)
        assert genesis(again) != genesis(lock)


def test_an_artefact_is_part_of_the_lock(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_folder("tiny"), model)
    target = {"serve": ["engine", "{port}"], "artefact": str(model)}
    folder = TrialFolder.open(write_trial(tmp_path / "t", target, {"url": "http://a/v1"}, make_tasks(4)))
    lock = make_lock(folder)
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert changes(lock, folder) == ["artefact of baseline"]
