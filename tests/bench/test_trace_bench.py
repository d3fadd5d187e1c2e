"""``halfbyte bench trace``: every row, the controls, the issue's bounds on a random mixture of 16 layers, the table of sizes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from halfbyte.bench import trace as bench
from halfbyte.bench.random_moe import moe_architecture
from halfbyte.bench.trace import TraceRow
from halfbyte.bench.trace_sizes import size_rows
from halfbyte.cli.main import main
from halfbyte.errors import ConfigError
from halfbyte.guidance.plan import make_plan
from halfbyte.models.precision import precision_from

COLUMNS = {
    "model", "method", "payload_bits", "sites", "layers", "k3_kl", "mean_abs_gap", "code_mismatch", "bytes_per_token",
    "step_seconds",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _environment_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))


def only(rows: list[TraceRow], method: str, **fields: object) -> TraceRow:
    (row,) = [r for r in rows if r.method == method and all(getattr(r, k) == v for k, v in fields.items())]
    return row


@pytest.mark.parametrize("layers", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_random_layers_meet_the_bounds(layers: int) -> None:
    """k3 KL at most 10% of independent rounding with expert input and KV on all layers, 2% with the intermediate as well."""
    trial = bench.random_trial("experts-w4a4kv4", layers=layers, prompts=2, samples=2, tokens=8)
    wanted = {"none", "trace", "scale_only", "shuffled"}
    runs = [r for r in bench.short_runs(trial) if r.label in wanted and r.bits == 4 and r.layers == "all" and r.replay]
    rows = list(bench.compare(trial, runs, "bf16"))
    everything = "expert_in+expert_mid+k+v"
    main_sites = only(rows, "trace", sites="expert_in+k+v", payload_bits=4, layers="all", router_replay=True)
    whole = only(rows, "trace", sites=everything, payload_bits=4, layers="all", router_replay=True)
    assert main_sites.share_k3 <= 0.10
    assert whole.share_k3 <= 0.02
    assert only(rows, "scale_only").share_k3 > 5 * whole.share_k3
    assert only(rows, "shuffled").share_k3 > 1.0
    assert only(rows, "none").share_k3 == 1.0
    assert whole.bytes_per_token == make_plan(trial.arch, trial.precision).formula_bytes(trial.arch, trial.precision)


def test_command_writes_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    code = main(
        [
            *("bench", "trace", "--precision", "w4a4kv4", "--products", "bf16", "--prompts", "4", "--samples", "2"),
            *("--tokens", "6", "--threads", str(torch.get_num_threads()), "--json", str(out)),
        ]
    )
    assert code == 0
    data = json.loads(out.read_text())
    assert all(row.keys() >= COLUMNS for row in data["rows"])
    methods = {row["method"] for row in data["rows"]}
    assert methods == {
        "none", "none, other spec", "asymmetric", "trace", "scale_only", "shift(0.5)", "hard_replay", "shuffled"
    }  # fmt: skip
    assert {row["payload_bits"] for row in data["rows"]} == {0, 1, 2, 4}
    assert len(data["sizes"]) == 8
    assert "gap of learner and rollout" in capsys.readouterr().out


def test_full_runs_cover_the_product() -> None:
    trial = bench.random_trial("experts-w4a4kv4", layers=2, prompts=1, samples=1, tokens=2)
    runs = bench.full_runs(trial)
    cells = {(str(r.method), r.bits, r.sites, r.layers) for r in runs if r.label == "trace"}
    assert len(cells) == 3 * 4 * 4  # bits, sets of sites (experts only: four differ), layer policies


def test_a_precision_without_rounded_activations_is_refused() -> None:
    with pytest.raises(ConfigError, match="rounds no activation"):
        bench.random_trial("w4a16", layers=2, prompts=1, samples=1, tokens=2)


def test_sizes_are_the_plans_formula() -> None:
    """The table's numbers against the plan of an architecture with Qwen3-30B-A3B's sizes."""
    arch = moe_architecture(
        hidden_size=2048, n_layers=48, n_heads=32, n_kv_heads=4, head_dim=128, n_experts=128, experts_per_token=8,
        moe_intermediate_size=768,
    )  # fmt: skip
    precision = precision_from("experts-w4a4kv4")
    rows = [r for r in size_rows() if r["model"] == "Qwen3-30B-A3B"]
    base = ("expert_in", "k", "v")
    plans = [
        make_plan(arch, precision, sites=base, layers="deep:0.5", bits=1),
        make_plan(arch, precision, sites=base, bits=1),
        make_plan(arch, precision, sites=(*base, "expert_mid"), bits=1),
        make_plan(arch, precision, sites=(*base, "expert_mid"), bits=4),
    ]
    assert [r["bytes_per_token"] for r in rows] == [p.formula_bytes(arch, precision) for p in plans]
