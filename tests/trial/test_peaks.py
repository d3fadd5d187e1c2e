"""From what a probe sees in every segment to the check of peak memory: each block counts, not the arm's peak alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trial_case import lines, outcome, trial, url_trial

from halfbyte.trial import run
from halfbyte.trial.folder import TrialFolder
from halfbyte.trial.lock import make_lock

N = 48


def seen(sizes: Iterator[int | None]) -> type:
    """A probe that sees these peaks, a segment each."""

    class Probe:
        def __init__(self, pid: int | None) -> None:
            self.peak_bytes = next(sizes)
            self.source = "remote" if self.peak_bytes is None else "PSS"

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    return Probe


def check_of(folder: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int | None]) -> dict[str, Any]:
    """The check of a run whose segments take so much memory: 2 blocks, ABBA and BAAB."""
    changed: dict[str, dict[str, Any]] = {
        "run": {"block_tasks": N // 4},
        "limits": {"benefit": "peak_memory", "benefit_min": 0.3},
    }
    with url_trial(folder, N, **changed) as (path, *_):
        make_lock(
            TrialFolder.open(path)
        )  # the preflight would refuse a claim about a URL's memory; the probe is ours here
        monkeypatch.setattr(run, "MemoryProbe", seen(iter(sizes)))
        code = trial("run", path)
        assert trial("verify", path) == code
    segments = [segment for block in lines(folder / "blocks.jsonl") for segment in block["segments"]]
    assert [segment["peak_bytes"] for segment in segments] == sizes
    (check,) = [c for c in outcome(folder)["decision"]["checks"] if c["name"] == "peak_memory"]
    return dict(check)


def test_the_worst_pairing_of_blocks_is_the_lower_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks of the arms: 1000 and 600, 40% less. But the blocks' are 1000 and 800 against 500 and 600: from 25% to 50%."""
    check = check_of(tmp_path, monkeypatch, [1000, 500, 480, 900, 600, 800, 790, 590])
    assert check["estimate"] == pytest.approx(0.4)
    assert (check["low"], check["high"]) == (pytest.approx(0.25), pytest.approx(0.5))
    assert (check["ok"], check["details"]["blocks"]) == (None, 2)


def test_equal_blocks_keep_what_the_peaks_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_of(tmp_path, monkeypatch, [1000, 600, 600, 1000, 600, 1000, 1000, 600])
    assert check["low"] == check["high"] == check["estimate"] == pytest.approx(0.4)
    assert check["ok"] is True


def test_an_arm_that_nobody_sees_into_claims_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_of(tmp_path, monkeypatch, [1000, None, None, 1000, None, 1000, 1000, None])
    assert (check["ok"], check["low"]) == (None, None)
