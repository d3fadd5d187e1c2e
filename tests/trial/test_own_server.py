"""A trial of `halfbyte serve` on the shipped policy: real processes, real memory, no prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trial_case import lines, outcome, steps, trial, write_trial

from halfbyte.envs import make_env

N = 16


def served(precision: str, pool: float) -> dict[str, Any]:
    command = ["halfbyte", "serve", "tiny", "--precision", precision, "--port", "{port}"]
    more = ["--kv-memory-mb", "{kv_memory_mb}", "--no-prefix-cache", "--max-sequences", "8", "--threads", "1"]
    return {
        "serve": command + more,
        "artefact": "tiny",
        "licence": "LICENSE",
        "precision": precision,
        "kv_memory_mb": pool,
    }


def sorting(n: int) -> list[dict[str, Any]]:
    """The task that the policy was trained on."""
    env = make_env("arithmetic:sort")
    prompts = [env.prompt("eval", i) for i in range(n)]
    return [{"id": p.id, "prompt": p.text, "scorer": {"type": "exact"}, "expected": p.answer} for p in prompts]


@pytest.mark.slow
def test_halfbyte_serve_in_two_precisions(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("Apache-2.0\n")
    write_trial(
        tmp_path,
        served("bf16", 8.0),
        served("w4a4kv4", 2.25),  # 4.5 of 16 bits a value: the same tokens
        sorting(N),
        run={"api": "completions", "exclusive": True, "block_tasks": 8},
        sampling={"max_tokens": 16},
        limits={"benefit": "peak_memory", "benefit_min": 0.3},
    )
    assert steps(tmp_path, "check", "pilot", "lock") == [0, 0, 0]
    code = trial("run", tmp_path)
    assert code in (1, 2)  # the program outweighs half a million weights: nothing is saved
    assert trial("verify", tmp_path) == code
    found = outcome(tmp_path)
    usage = found["usage"]
    assert usage["candidate"]["weights_bytes"] < 0.6 * usage["baseline"]["weights_bytes"]
    assert usage["candidate"]["kv_capacity_tokens"] == pytest.approx(usage["baseline"]["kv_capacity_tokens"], rel=0.01)
    assert usage["baseline"]["source"] == "engine metrics + PSS"
    assert usage["baseline"]["peak_bytes"] > usage["baseline"]["weights_bytes"]
    assert {f["name"]: f["ok"] for f in found["integrity"]}["prefix cache"] is True
    records = lines(tmp_path / "records.jsonl")
    assert all(r["error"] is None for r in records)
    assert all(r["passed"] is not None for r in records)
    pilot = {(r["task"], r["arm"]): r["text"] for r in lines(tmp_path / "pilot.jsonl")}
    again = {(r["task"], r["arm"]): r["text"] for r in records}
    for task in {task for task, _ in again}:  # greedy and batch-invariant: the baseline says the same three times
        assert pilot[task, "baseline"] == pilot[task, "candidate"] == again[task, "baseline"]
