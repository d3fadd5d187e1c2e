"""Faults of servers, folders and people, each with the right exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_server import FAULTS
from trial_case import lines, make_tasks, outcome, said, steps, trial, two_servers, url_trial, write_trial

N = 16
ERRORS = {
    "http 500": "http 500",
    "http 400": "http 400",
    "hang": "timeout",
    "truncated": "truncated stream",
    "no done": "truncated stream",
    "no reason": "truncated stream",
    "garbage event": "bad json",
    "wrong shape": "bad json",
    "garbage": "truncated stream",
    "disconnect": "connection",
    "error event": "server error",
}


@pytest.mark.parametrize("faults", [[f for f in FAULTS if f != "hang"], ["hang"]], ids=["all", "hang"])
def test_a_fault_of_the_candidate_is_recorded_and_never_kept(tmp_path: Path, faults: list[str]) -> None:
    """Each hits one task; it is a failed request of the candidate, not sent again, and the trial goes on."""
    hit = {f"t{4 + i:03d}": fault for i, fault in enumerate(faults)}
    script = {"faults": {said(4 + i): fault for i, fault in enumerate(faults)}}
    run = {"timeout": 3.0 if faults == ["hang"] else 60.0}
    with url_trial(tmp_path, N, candidate=script, run=run) as (folder, _, second):
        assert steps(folder, "check", "lock") == [0, 0]
        second.bodies.clear()
        assert trial("run", folder) in (1, 2)
        sent = [body["messages"][0]["content"] for body in second.bodies]
    assert sorted(sent[1:]) == sorted(said(i) for i in range(N))  # each once, after the warm-up
    records = {(r["task"], r["arm"]): r for r in lines(tmp_path / "records.jsonl")}
    for task, fault in hit.items():
        failed = records.pop((task, "candidate"))
        assert failed["error"].partition(":")[0] == ERRORS[fault], fault
        assert (failed["passed"], failed["text"], failed["attempts"]) == (None, "", 1)
    assert all(r["error"] is None and r["passed"] for r in records.values())
    assert trial("verify", tmp_path) in (1, 2)


def test_all_of_a_servers_requests_fail(tmp_path: Path) -> None:
    """It answered the preflight and then broke: the failures are a result, and it is not kept."""
    with url_trial(tmp_path, N) as (folder, _, second):
        assert steps(folder, "check", "lock") == [0, 0]
        second.script.faults = {said(i): "http 500" for i in range(N)}
        assert trial("run", folder) == 1
    checks = {check["name"]: check for check in outcome(tmp_path)["decision"]["checks"]}
    assert checks["failure_rate"]["ok"] is False


def test_whole_responses_without_streaming(tmp_path: Path) -> None:
    faults = {said(1): "garbage", said(2): "http 500", said(3): "disconnect"}
    with url_trial(tmp_path, N, candidate={"faults": faults}, run={"stream": False}) as (folder, *_):
        assert steps(folder, "lock") == [4]
        (folder / "check.json").unlink(missing_ok=True)
        assert trial("check", folder) == 4  # the first tasks are the probes, and they fail
    faults = {said(11): "garbage", said(12): "http 500", said(13): "disconnect"}
    with url_trial(tmp_path / "second", N, candidate={"faults": faults}, run={"stream": False}) as (folder, *_):
        assert steps(folder, "check", "lock") == [0, 0]
        assert trial("run", folder) in (1, 2)
    errors = {r["task"]: r["error"].partition(":")[0] for r in lines(folder / "records.jsonl") if r["error"]}
    assert errors == {"t011": "bad json", "t012": "http 500", "t013": "connection"}
    assert all(r["ttft"] is None for r in lines(folder / "records.jsonl"))


def test_a_changed_template_is_refused_before_and_during_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with url_trial(tmp_path, N, candidate={"template": 9}) as (folder, *_):
        assert trial("check", folder) == 4
        assert "prompt tokens for the same messages" in capsys.readouterr().out
    with url_trial(tmp_path, N) as (folder, _, second):
        assert steps(folder, "check", "lock") == [0, 0]
        second.script.template = 9  # the server was restarted with another template after the preflight
        assert trial("run", folder) == 3
        assert outcome(folder)["decision"]["verdict"] == "invalid"
        blocks = len(lines(folder / "blocks.jsonl"))
        assert blocks == 1  # stopped at once: the rest would be wasted
        assert steps(folder, "run", "report", "verify") == [3, 3, 3]
        assert len(lines(folder / "blocks.jsonl")) == blocks


def test_a_changed_template_may_be_part_of_the_trial(tmp_path: Path) -> None:
    with url_trial(tmp_path, N, candidate={"template": 9}, run={"allow_template_change": True}) as (folder, *_):
        assert steps(folder, "check", "lock") == [0, 0]
        assert trial("run", folder) in (1, 2)


def test_cache_contamination_is_invalid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """prefix_cache = off, and a server finds prompts in its cache: in the preflight 4, in the run 3."""
    with url_trial(tmp_path, N, candidate={"cache": True}) as (folder, *_):
        assert trial("check", folder) == 4
        assert "a prompt sent twice was found in the cache" in capsys.readouterr().out
    with url_trial(tmp_path, N, run={"repeats": 2}) as (folder, _, second):
        assert steps(folder, "check", "lock") == [0, 0]
        second.script.cache = True
        assert trial("run", folder) == 3
        assert any("prefix cache" in reason for reason in outcome(folder)["decision"]["reasons"])
        assert trial("verify", folder) == 3


def test_a_remote_cache_that_cannot_be_emptied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with url_trial(tmp_path, N, run={"prefix_cache": "reset"}) as (folder, *_):
        assert trial("check", folder) == 4
        assert "no endpoint that empties it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("field", "value"), [("text", "answer 3"), ("passed", True), ("latency", 1e-3), ("error", None)]
)
def test_a_tampered_record_is_invalid(tmp_path: Path, field: str, value: object) -> None:
    with url_trial(tmp_path, N, candidate={"passing": 0.0}) as (folder, *_):
        assert steps(folder, "check", "lock", "run") == [0, 0, 1]
    path = tmp_path / "records.jsonl"
    kept = lines(path)
    at = next(i for i, r in enumerate(kept) if r["arm"] == "candidate" and (field == "error" or r.get(field) != value))
    kept[at][field] = value if field != "error" else "timeout"
    path.write_text("".join(json.dumps(r) + "\n" for r in kept))
    assert steps(tmp_path, "verify", "report", "run", "review") == [3, 3, 3, 3]


@pytest.mark.parametrize("damage", ["drop", "double", "swap", "cut"])
@pytest.mark.parametrize("name", ["records.jsonl", "blocks.jsonl"])
def test_lost_doubled_or_swapped_lines_are_noticed(tmp_path: Path, name: str, damage: str) -> None:
    with url_trial(tmp_path, N) as (folder, *_):
        assert steps(folder, "check", "lock") == [0, 0]
        trial("run", folder)
    path = tmp_path / name
    kept = path.read_bytes().splitlines(keepends=True)
    changed = {
        "drop": kept[:1] + kept[2:],
        "double": kept[:2] + kept[1:],
        "swap": [kept[1], kept[0], *kept[2:]],
        "cut": [*kept[:1], kept[1][:-20] + b"\n", *kept[2:]],
    }[damage]
    path.write_bytes(b"".join(changed))
    assert trial("verify", tmp_path) == 3


def test_an_edited_outcome_is_noticed(tmp_path: Path) -> None:
    with url_trial(tmp_path, N, candidate={"passing": 0.0}) as (folder, *_):
        assert steps(folder, "check", "lock", "run") == [0, 0, 1]
    found = outcome(tmp_path)
    found["decision"]["verdict"], found["decision"]["exit_code"] = "keep", 0
    (tmp_path / "outcome.json").write_text(json.dumps(found))
    assert trial("verify", tmp_path) == 3
    assert steps(tmp_path, "report", "verify") == [1, 1]


def edit(folder: Path, name: str, before: str, after: str) -> None:
    """Change a text of a file."""
    text = (folder / name).read_text()
    assert before in text
    (folder / name).write_text(text.replace(before, after, 1))


EDITS: dict[str, tuple[str, str, str]] = {
    "[limits]": ("trial.toml", "margin = 0.1", "margin = 0.3"),
    "[cost]": ("trial.toml", "machine_per_hour = 1.0", "machine_per_hour = 2.0"),
    "[sampling]": ("trial.toml", "max_tokens = 16", "max_tokens = 17"),
    "[run]": ("trial.toml", "concurrency = 4", "concurrency = 5"),
    "tasks t003": ("tasks.jsonl", '"answer 3"', '"no idea"'),
    "scorers scorer.py:judge": ("scorer.py", "==", "!="),
    "tuning data tuned.txt": ("tuned.txt", "something", "anything"),
}


@pytest.mark.parametrize("part", EDITS)
def test_what_was_locked_cannot_be_edited(tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the run and after it: exit code 3, and what was changed is named."""
    (tmp_path / "scorer.py").write_text("def judge(task, response):\n    return response['text'] == task['expected']\n")
    (tmp_path / "tuned.txt").write_text("something else altogether\n")
    tasks = make_tasks(8)
    tasks[0]["scorer"] = {"type": "python", "function": "scorer.py:judge"}
    with url_trial(tmp_path, 8, tasks=tasks, data={"tuning": ["tuned.txt"]}) as (folder, first, _):
        assert steps(folder, "check", "lock") == [0, 0]
        asked = len(first.bodies)
        edit(folder, *EDITS[part])
        assert trial("run", folder) == 3
        assert part in capsys.readouterr().err
        assert len(first.bodies) == asked
        name, before, after = EDITS[part]
        edit(folder, name, after, before)
        assert trial("run", folder) in (1, 2)
    edit(tmp_path, *EDITS[part])
    assert steps(tmp_path, "report", "verify", "lock") == [3, 3, 3]


def test_a_lock_remade_by_hand_breaks_the_chain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from halfbyte.trial.folder import TrialFolder
    from halfbyte.trial.lock import make_lock

    with url_trial(tmp_path, N) as (folder, *_):
        assert steps(folder, "check", "lock") == [0, 0]
        trial("run", folder)
    edit(tmp_path, *EDITS["[limits]"])
    records = tmp_path / "records.jsonl"
    records.rename(tmp_path / "hidden")
    make_lock(TrialFolder.open(tmp_path), again=True)
    (tmp_path / "hidden").rename(records)
    assert steps(tmp_path, "verify", "run") == [3, 3]
    assert "chain" in capsys.readouterr().err


def test_commands_out_of_order_say_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with url_trial(tmp_path, N) as (folder, *_):
        for command, wants in (
            ("run", "lock"),
            ("lock", "check"),
            ("report", "lock"),
            ("verify", "run"),
        ):
            assert trial(command, folder) == 4
            assert f"halfbyte trial {wants}" in capsys.readouterr().err
        assert trial("check", folder) == 0
        edit(folder, *EDITS["[run]"])
        assert trial("lock", folder) == 4
        assert "changed since the preflight" in capsys.readouterr().err
        assert steps(folder, "check", "lock", "report") == [0, 0, 4]
        assert "not finished" in capsys.readouterr().err
    assert trial("check", tmp_path / "nowhere") == 4


@pytest.mark.parametrize("request_number", [1, 6, 16])
def test_kill_9_mid_run_and_go_on(tmp_path: Path, request_number: int) -> None:
    """Killed while a request is in flight, anywhere: finished blocks are kept, the cut block is done again, all is verified."""
    go, struck = threading.Event(), threading.Event()
    victim: list[subprocess.Popen[bytes]] = []
    counting = threading.Event()
    seen = [0]

    def on_request(_: int) -> None:
        if counting.is_set() and not struck.is_set():
            seen[0] += 1
            if seen[0] == request_number:
                go.wait()
                struck.set()
                victim[0].send_signal(signal.SIGKILL)

    with two_servers(N, on_request=on_request) as (first, second):
        write_trial(
            tmp_path, {"url": first.url}, {"url": second.url}, make_tasks(N), run={"concurrency": 2, "warmup": 0}
        )
        assert steps(tmp_path, "check", "lock") == [0, 0]
        counting.set()
        command = [sys.executable, "-m", "halfbyte", "trial", "run", str(tmp_path)]
        source = str(Path(__file__).parents[2] / "src")
        victim.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": source}, stderr=subprocess.DEVNULL))
        go.set()
        assert victim[0].wait() == -signal.SIGKILL
        before = (tmp_path / "blocks.jsonl").read_bytes() if (tmp_path / "blocks.jsonl").exists() else b""
        kept = lines(tmp_path / "blocks.jsonl")[-1]["end"] if before else 0
        finished = (tmp_path / "records.jsonl").read_bytes()[:kept]
        partial = (tmp_path / "records.jsonl").stat().st_size - kept
        assert trial("run", tmp_path) in (1, 2)
    assert (tmp_path / "blocks.jsonl").read_bytes().startswith(before)
    assert (tmp_path / "records.jsonl").read_bytes().startswith(finished)
    assert (tmp_path / "abandoned.jsonl").exists() == (partial > 0)
    records = lines(tmp_path / "records.jsonl")
    assert len({(r["arm"], r["task"]) for r in records}) == len(records) == 2 * N
    assert trial("verify", tmp_path) in (1, 2)


@pytest.mark.parametrize("name", ["records.jsonl", "blocks.jsonl"])
def test_torn_files_are_mended(tmp_path: Path, name: str) -> None:
    """Cut anywhere behind the last whole block: the run goes on, and abandoned records are kept aside and counted."""
    with url_trial(tmp_path, 4, run={"block_tasks": 1}) as (folder, *_):
        assert steps(folder, "check", "lock") == [0, 0]
        code = trial("run", folder)
        records, blocks = (tmp_path / "records.jsonl").read_bytes(), (tmp_path / "blocks.jsonl").read_bytes()
        ends = [block["end"] for block in lines(tmp_path / "blocks.jsonl")]
        whole = blocks.index(b"\n") + 1
        second = blocks.index(b"\n", whole) + 1
        shapes: list[tuple[bytes, bytes]] = {
            "records.jsonl": [(records[: ends[0] + extra], blocks[:whole]) for extra in (1, ends[1] - ends[0])],
            "blocks.jsonl": [(records[: ends[1]], blocks[:end]) for end in (whole, second - 1)],
        }[name]
        for number, (left, done) in enumerate(shapes):
            (tmp_path / "records.jsonl").write_bytes(left)
            (tmp_path / "blocks.jsonl").write_bytes(done)
            (tmp_path / "abandoned.jsonl").unlink(missing_ok=True)
            assert trial("run", folder) == code, number
            assert trial("verify", folder) == code
            extra = left[ends[0] :]
            assert (tmp_path / "abandoned.jsonl").exists() == bool(extra)
            if extra:
                assert (tmp_path / "abandoned.jsonl").read_bytes().rstrip(b"\n") == extra.rstrip(b"\n")
                assert lines(tmp_path / "blocks.jsonl")[1]["abandoned"] == extra.rstrip(b"\n").count(b"\n") + 1


def test_two_runs_at_once_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from halfbyte.trial.folder import TrialFolder

    with url_trial(tmp_path, N) as (folder, *_):
        assert steps(folder, "check", "lock") == [0, 0]
        with TrialFolder.open(folder).alone():
            assert trial("run", folder) == 4
        assert "another process runs this trial" in capsys.readouterr().err


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with two_servers(N) as (first, _):
        write_trial(tmp_path, {"url": first.url}, {"url": "http://127.0.0.1:9/v1"}, make_tasks(N))
        assert trial("check", tmp_path) == 4
        assert "does not list its models" in capsys.readouterr().out
        write_trial(tmp_path, {"url": first.url, "model": "other"}, {"url": first.url}, make_tasks(N))
        assert trial("check", tmp_path) == 4
        assert "does not serve 'other'" in capsys.readouterr().out


def test_tokens_come_from_the_environment_and_stay_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_servers(N, candidate={"token": "s3cret-of-mine"}) as (first, second):
        target = {"url": second.url, "api_key_env": "TRIAL_TOKEN"}
        write_trial(tmp_path, {"url": first.url}, target, make_tasks(N))
        monkeypatch.delenv("TRIAL_TOKEN", raising=False)
        assert trial("check", tmp_path) == 4
        monkeypatch.setenv("TRIAL_TOKEN", "s3cret-of-mine")
        assert steps(tmp_path, "check", "lock") == [0, 0]
        assert trial("run", tmp_path) in (1, 2)
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes()
