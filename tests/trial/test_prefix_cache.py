"""vLLM #54227, #52884: a warm prefix cache flatters whoever comes second. It is refused, emptied, or measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from trial_case import lines, outcome, steps, trial, url_trial

from halfbyte.trial.blocks import EngineFigures
from halfbyte.trial.folder import TrialFolder
from halfbyte.trial.integrity import assess, hit_share, problems
from halfbyte.trial.journal import read_blocks, read_records
from halfbyte.trial.lock import genesis, read_lock

N = 16


def cache_finding(folder: Path) -> tuple[bool | None, str]:
    found = [finding for finding in outcome(folder)["integrity"] if finding["name"] == "prefix cache"]
    assert len(found) == 1
    return found[0]["ok"], found[0]["detail"]


def test_vllm_54227_a_warm_cache_in_one_arm_is_invalid(tmp_path: Path) -> None:
    """Emptied before every segment in one arm, kept in the other, which then finds the second repeat's prompts."""
    both = {"cache": True, "resettable": True}
    with url_trial(tmp_path, N, both, both, run={"prefix_cache": "reset", "repeats": 2}) as (folder, _, second):
        assert steps(folder, "check", "lock") == [0, 0]
        second.seen = type("Sticky", (set,), {"clear": lambda self: None})()  # it says that it has emptied its cache
        assert trial("run", folder) == 3
    ok, detail = cache_finding(tmp_path)
    assert ok is False
    assert "baseline 0.0%, candidate" in detail


def test_vllm_52884_emptied_caches_are_equal_and_the_order_is_mirrored(tmp_path: Path) -> None:
    both = {"cache": True, "resettable": True}
    with url_trial(tmp_path, N, both, both, run={"prefix_cache": "reset", "repeats": 2}) as (folder, *_):
        assert steps(folder, "check", "lock") == [0, 0]
        assert trial("run", folder) in (1, 2)
    assert cache_finding(tmp_path)[0] is True
    blocks = lines(tmp_path / "blocks.jsonl")
    assert {segment["cache"] for block in blocks for segment in block["segments"]} == {"reset"}
    assert [block["order"] for block in blocks] == ["ABBA", "BAAB"] * (len(blocks) // 2)


def test_vllm_54227_measured_hit_shares_are_shown(tmp_path: Path) -> None:
    """Left alone, every repeat after the first is found in the cache, in both arms alike."""
    with url_trial(
        tmp_path, N, {"cache": True}, {"cache": True}, run={"prefix_cache": "measure", "repeats": 2, "warmup": 0}
    ) as (folder, first, second):
        assert steps(folder, "check", "lock") == [0, 0]
        first.seen.clear()
        second.seen.clear()
        assert trial("run", folder) in (1, 2)
    assert cache_finding(tmp_path) == (True, "prompt tokens found in the prefix cache: baseline 50.0%, candidate 50.0%")


def test_without_usage_the_engines_counters_tell(tmp_path: Path) -> None:
    script = {"usage": False, "cache": True, "weights_bytes": 1000}
    with url_trial(tmp_path, N, script, script, run={"prefix_cache": "measure", "repeats": 2}) as (folder, *_):
        assert steps(folder, "check", "lock") == [0, 0]
        assert trial("run", folder) in (1, 2)
    trial_folder = TrialFolder.open(tmp_path)
    start = genesis(read_lock(trial_folder))
    blocks = read_blocks(trial_folder.blocks("run"), start)
    records = read_records(trial_folder.records("run"), blocks, start)
    assert all(record.cached_tokens is None for record in records)
    for arm in ("baseline", "candidate"):
        assert hit_share(records, blocks, arm) == pytest.approx(0.5, abs=0.1)  # the probes were cached as well
    assert blocks[0].segments[0].after != EngineFigures()
    assert problems(assess(trial_folder, "run", records, blocks)) == []


def test_a_server_that_says_nothing_of_its_cache_is_not_called_clean(tmp_path: Path) -> None:
    with url_trial(tmp_path, N, {"usage": False}, {"usage": False}) as (folder, *_):
        assert steps(folder, "check", "lock") == [0, 0]
        assert trial("run", folder) in (1, 2)
    ok, detail = cache_finding(tmp_path)
    assert ok is None
    assert "not checked" in detail
