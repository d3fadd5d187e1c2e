"""init, check, pilot, plan, lock, run, report, verify against scripted servers: the right verdict, by exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fake_server
import pytest
from fake_server import FakeServer, Script, write_script
from trial_case import answers, lines, make_tasks, outcome, steps, trial, url_trial, write_trial

from halfbyte.cli.main import main

ALL = ("check", "pilot", "plan", "lock", "run", "report", "verify")
N = 48


def served(folder: Path, name: str, **script: object) -> dict[str, object]:
    """A target that the trial starts: a process of the scripted server."""
    write_script(folder / f"{name}.json", Script(**{"name": name, "answers": answers(N), **script}))  # type: ignore[arg-type]
    command = [sys.executable, fake_server.__file__, "--port", "{port}", f"{name}.json"]
    return {"serve": command, "artefact": "tiny", "licence": "LICENSE", "precision": "bf16", "kv_memory_mb": 1.0}


def test_a_candidate_as_good_with_half_the_memory_is_kept(tmp_path: Path) -> None:
    """Servers started by the trial, both up at once; memory is measured as their processes' PSS."""
    (tmp_path / "LICENSE").write_text("Apache-2.0\n")
    pool = {"weights_bytes": 1 << 20, "kv_bytes": 1 << 20, "kv_tokens": 4096}
    write_trial(
        tmp_path,
        served(tmp_path, "full", ballast_mb=200, **pool),
        served(tmp_path, "half", **pool),
        make_tasks(N),
        limits={"benefit": "peak_memory", "benefit_min": 0.3},
    )
    assert steps(tmp_path, *ALL) == [0, 0, 0, 0, 0, 0, 0]
    found = outcome(tmp_path)
    assert found["decision"]["verdict"] == "keep"
    before, after = (found["usage"][arm]["peak_bytes"] for arm in ("baseline", "candidate"))
    assert before - after == pytest.approx(200 << 20, rel=0.2)  # the ballast, and little else
    assert found["usage"]["baseline"]["source"] == "engine metrics + PSS"
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert "keep" in (tmp_path / "report.md").read_text().lower()


def test_only_one_server_fits(tmp_path: Path) -> None:
    """Exclusive: whoever is not asked is down, and every change of arm is a start."""
    (tmp_path / "LICENSE").write_text("Apache-2.0\n")
    write_trial(
        tmp_path,
        served(tmp_path, "full"),
        served(tmp_path, "half"),
        make_tasks(4),
        run={"exclusive": True, "block_tasks": 1, "warmup": 0},
    )
    assert steps(tmp_path, "check", "lock") == [0, 0]
    assert trial("run", tmp_path) in (1, 2)  # four tasks show nothing
    segments = [segment for block in lines(tmp_path / "blocks.jsonl") for segment in block["segments"]]
    assert [segment["arm"][0] for segment in segments] == list("bccb" + "cbbc")
    changes = [i == 0 or segments[i - 1]["arm"] != segment["arm"] for i, segment in enumerate(segments)]
    assert [segment["start_seconds"] is not None for segment in segments] == changes
    logs = (tmp_path / "logs" / "baseline.log").read_text()
    assert logs.count("$ ") == 1 + sum(changes[i] for i, s in enumerate(segments) if s["arm"] == "baseline")


def test_a_candidate_that_fails_more_tasks_is_not_kept(tmp_path: Path) -> None:
    with url_trial(tmp_path, N, candidate={"passing": 0.3}) as (folder, *_):
        assert steps(folder, *ALL) == [0, 0, 0, 0, 1, 1, 1]
    assert outcome(tmp_path)["decision"]["verdict"] == "retain"


def test_a_cheaper_candidate_is_kept(tmp_path: Path) -> None:
    with url_trial(tmp_path, N, baseline={"seconds": 0.12}) as (folder, *_):
        assert steps(folder, *ALL) == [0, 0, 0, 0, 0, 0, 0]
    checks = {check["name"]: check for check in outcome(tmp_path)["decision"]["checks"]}
    assert checks["cost_per_passed"]["low"] > 0.2


def test_too_few_tasks_are_inconclusive(tmp_path: Path) -> None:
    """Ten pairs without a flip show no more than that the loss is below 21 points."""
    with url_trial(tmp_path, 16, baseline={"seconds": 0.1}, limits={"margin": 0.05}) as (folder, *_):
        assert steps(folder, "check", "lock", "run", "report", "verify") == [0, 0, 2, 2, 2]
    decision = outcome(tmp_path)["decision"]
    assert decision["verdict"] == "inconclusive"
    assert decision["more_tasks"] > 0


def test_both_arms_get_the_same_requests(tmp_path: Path) -> None:
    with url_trial(
        tmp_path, 8, run={"repeats": 2}, sampling={"temperature": 0.7, "stop": ["\n"], "extra": {}, "seed": 5}
    ) as (folder, first, second):
        assert steps(folder, "check", "lock") == [0, 0]
        first.bodies.clear()
        second.bodies.clear()
        trial("run", folder)

    def sent(server: FakeServer) -> list[str]:
        bodies = [{k: v for k, v in body.items() if k != "model"} for body in server.bodies]
        return sorted(json.dumps(body, sort_keys=True) for body in bodies)

    assert sent(first) == sent(second)
    assert len(sent(first)) == 8 * 2 + 1  # and one to warm up
    assert {body["model"] for body in first.bodies} == {"full"}
    assert {body["seed"] for body in second.bodies} >= {5, 6}
    records = lines(tmp_path / "records.jsonl")
    assert len({(r["arm"], r["task"], r["repeat"]) for r in records}) == len(records) == 32
    assert {r["seed"] - r["repeat"] for r in records} == {5}


def test_init_writes_files_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from halfbyte.trial.folder import TrialFolder

    for name, given in (("urls", ("http://a:1/v1", "http://b:2/v1")), ("models", ("some/model", "some/model-fp4"))):
        assert main(["trial", "init", str(tmp_path / name), "--baseline", given[0], "--candidate", given[1]]) == 0
        trial_folder = TrialFolder.open(tmp_path / name)
        assert trial_folder.settings.baseline.started == (name == "models")
        assert len(trial_folder.tasks) == 3
    assert trial("check", tmp_path / "models") == 4
    said = capsys.readouterr().out
    assert "no such model folder" in said
    assert main(["trial", "init", str(tmp_path / "urls")]) == 4  # never overwritten


def test_a_second_run_of_a_finished_trial_sends_nothing(tmp_path: Path) -> None:
    with url_trial(tmp_path, 8) as (folder, first, _):
        assert steps(folder, "check", "lock") == [0, 0]
        code = trial("run", folder)
        sent = len(first.bodies)
        assert trial("run", folder) == code
        assert len(first.bodies) == sent
        assert steps(folder, "check", "verify") == [0, code]  # another preflight changes nothing that was locked


def test_review_keeps_notes_and_leaves_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with url_trial(tmp_path, N, candidate={"passing": 0.3}) as (folder, *_):
        assert steps(folder, "check", "lock", "run") == [0, 0, 1]
    lost = next(r["task"] for r in lines(tmp_path / "records.jsonl") if r["arm"] == "candidate" and not r["passed"])
    capsys.readouterr()
    assert trial("review", tmp_path, "--task", lost, "--note", "the answer is right, if terse", "--by", "ann") == 0
    assert "the answer is right, if terse (ann)" in capsys.readouterr().out
    assert trial("review", tmp_path, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    passed = [r["task"] for r in lines(tmp_path / "records.jsonl") if r["arm"] == "candidate" and r["passed"]]
    assert sorted(r["task"] for r in shown["regressions"]) == sorted({f"t{i:03d}" for i in range(N)} - set(passed))
    assert [note["task"] for note in shown["notes"]] == [lost]
    assert trial("review", tmp_path, "--task", "no such task", "--note", "x") == 4
    assert trial("verify", tmp_path) == 1
