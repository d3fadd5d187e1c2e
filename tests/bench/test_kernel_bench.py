"""The rows of ``halfbyte bench kernels``: what they hold, and that the error column notices a kernel that is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.bench import kernels as bench
from halfbyte.bench import libraries, oracle
from halfbyte.bench.attention import Contexts
from halfbyte.bench.case import Case, KernelRow, measure
from halfbyte.bench.experts import Routed
from halfbyte.bench.libraries import Library
from halfbyte.bench.linear import Products
from halfbyte.bench.quantise import Conversions
from halfbyte.cli.main import main
from halfbyte.errors import ConfigError
from halfbyte.formats import get_spec, quantise
from halfbyte.kernels import Kernels, active

COLUMNS = {
    "kernel",
    "n",
    "k",
    "m",
    "milliseconds",
    "baseline",
    "baseline_milliseconds",
    "ratio",
    "relative_error",
}


@pytest.fixture(autouse=True)
def _environment_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))


def tiny_plan(found: list[Library] | None = None, repeats: int = 2) -> bench.Plan:
    return bench.Plan(
        products=Products(((48, 64), (16, 32)), (1, 3), budget=20_000),
        twins=Products(((48, 64),), (2,), budget=0),
        routed=Routed(4, 2, 64, 32, (1, 5), budget=30_000),
        contexts=[Contexts((64,), 2, 4, 2, 32, budget=0)],
        conversions=Conversions(((4, 64, 0), (8, 128, 5000)), found or [], threads=2),
        repeats=repeats,
        minimum=0.0,
    )


class Broken:
    """The active kernels, with some operations that get one value slightly wrong."""

    def __init__(self, operation: str | tuple[str, ...]) -> None:
        self._operations = (operation,) if isinstance(operation, str) else operation

    def __getattr__(self, name: str) -> Any:
        good = getattr(active(), name)
        if name not in self._operations:
            return good

        def wrong(*arguments: Any, **named: Any) -> Any:
            result = good(*arguments, **named)
            if isinstance(result, Tensor):
                flat = result.reshape(-1)
                flat[-1] += flat.float().norm().to(flat.dtype) * 0.01
            else:
                last = result[1] if isinstance(result, tuple) else getattr(result, "inputs", result)
                last.codes.reshape(-1)[-1] ^= 1
            return result

        return wrong


@pytest.mark.parametrize("group", bench.GROUPS)
def test_every_row_is_right_and_complete(group: str) -> None:
    rows = list(bench.run(active(), tiny_plan(), [group]))
    assert rows
    for row in rows:
        found = row.to_json()
        assert found.keys() >= COLUMNS
        assert json.loads(json.dumps(found)) == found
        assert row.relative_error <= 1e-6
        assert row.milliseconds > 0
        assert found["ratio"] == row.baseline_milliseconds / row.milliseconds
        assert found["rounds"] == 2
        low, high = found["milliseconds_quartiles"]
        assert low <= row.milliseconds <= high


@pytest.mark.parametrize(
    ("group", "operation"),
    [
        ("linear", "linear"),
        ("w4a16", "linear"),
        ("bf16", "linear"),
        ("experts", "experts"),
        ("attention", "attention"),
        ("quantise", "quantise"),
        ("dequantise", "dequantise"),
        ("guidance", ("quantise_with_payload", "guided_round", "linear_recorded", "experts_recorded")),
    ],
)
def test_a_kernel_that_is_wrong_shows_in_the_error(group: str, operation: str | tuple[str, ...]) -> None:
    kernels: Kernels = Broken(operation)  # type: ignore[assignment]
    assert all(row.relative_error > 1e-4 for row in bench.run(kernels, tiny_plan(), [group]))


def test_the_oracle_is_float64_and_not_the_kernels_own_sum() -> None:
    """Operands whose products cancel to less than float32 keeps: the exact result is known, the kernel's is not it."""
    x = torch.tensor([[2.0**24, 1.0, -(2.0**24)]])
    w = torch.ones(1, 3)
    exact = oracle.product(oracle.inputs(x, "fp32", None), w)
    assert exact.item() == 1.0
    assert oracle.relative_error(torch.zeros(1, 1), exact) == 1.0


def test_values_of_codes_are_those_of_the_definition() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 5)[:, None]
    for name in ("halfbyte", "halfbyte_token", "halfbyte_kv"):
        q = quantise(x, get_spec(name))
        assert torch.equal(oracle.values(q), q.dequantise().double())


def test_relative_error_looks_at_every_row_and_at_nan() -> None:
    exact = torch.tensor([[1e6, 0.0], [1.0, 0.0], [0.0, 0.0]])
    assert oracle.relative_error(exact, exact) == 0.0
    assert oracle.relative_error(exact + torch.tensor([[0.0], [0.5], [0.0]]), exact) == pytest.approx(0.5 * 2**0.5)
    assert oracle.relative_error(exact + torch.tensor([[0.0], [0.0], [2.0]]), exact) == pytest.approx(2 * 2**0.5)
    assert oracle.relative_error(torch.full((3, 2), torch.nan), exact) == torch.inf


def test_speed_is_elements_over_time_over_threads() -> None:
    case = Case("quantise", 0, 4, 4, [lambda: None], "none", [lambda: None], lambda: 0.0, elements=1000, threads=4)
    row = measure(case, repeats=3, minimum=0.0)
    assert row.facts["gelem_per_second_per_thread"] == pytest.approx(1000 / (row.milliseconds / 1e3) / 4 / 1e9)


def test_an_fp4_cache_holds_three_and_a_half_times_as_much() -> None:
    fp4, bf16 = bench.run(active(), tiny_plan(), ["attention"])
    assert fp4.facts["capacity_ratio"] == pytest.approx(16 / 4.5)
    assert "capacity_ratio" not in bf16.facts


def test_weights_rotate_over_more_than_the_budget() -> None:
    for case in bench.GROUPS["linear"](active(), tiny_plan()):
        for side, entry in ((case.ours, "working_set_mib"), (case.theirs, "baseline_working_set_mib")):
            weights = {id(call.args[1]) for call in side}  # type: ignore[attr-defined]
            assert len(weights) == len(side) > 1
            assert case.facts[entry] * 2**20 > 20_000 - 2**20 * 0.05  # the entry is rounded to a tenth


def test_experts_get_other_routes_in_every_call() -> None:
    case = next(bench.GROUPS["experts"](active(), tiny_plan()))
    routes = {tuple(call.args[1].flatten().tolist()) for call in case.ours}  # type: ignore[attr-defined]
    assert len(routes) > 3
    assert [c.args[1].tolist() for c in case.ours[:16]] == [c.args[1].tolist() for c in case.theirs[:16]]  # type: ignore[attr-defined]


def test_other_libraries_are_compared_with_where_they_are_and_named_where_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Library:
        raise ImportError("No module named 'absent'")

    there = Library("there 1.0", lambda x: x.clone(), lambda q: q.float())
    monkeypatch.setattr(libraries, "LIBRARIES", {"there": lambda: there, "absent": missing})
    found, absent = libraries.find_libraries()
    assert found == [there]
    assert len(absent) == 1
    assert absent[0].startswith("absent: ")
    rows = list(bench.run(active(), tiny_plan(found), ["quantise", "dequantise"]))
    assert [row.baseline for row in rows] == ["there 1.0", "halfbyte reference"] * 4


def test_groups_are_chosen_by_name() -> None:
    assert bench.choose("") == list(bench.GROUPS)
    assert bench.choose("experts, linear") == ["linear", "experts"]
    with pytest.raises(ConfigError, match="linaer"):
        bench.choose("linaer")


def test_the_command_writes_table_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "quick_plan", tiny_plan)
    file = tmp_path / "new" / "rows.json"
    command = ["bench", "kernels", "--quick", "--only", "linear,dequantise", "--repeats", "3", "--json", str(file)]
    assert main(command) == 0
    printed = capsys.readouterr()
    written = json.loads(file.read_text())
    assert written["machine"]["kernels"] == active().name
    assert [row["kernel"] for row in written["rows"]] == ["linear-w4a4"] * 4 + ["dequantise"] * 2
    assert all(row.keys() >= COLUMNS and row["rounds"] == 3 for row in written["rows"])
    assert printed.out.count("linear-w4a4") == printed.err.count("linear-w4a4") == 4
    assert all(name in printed.out for name in ("torch bf16 linear", "halfbyte reference", "Gelem/s/thread"))
    assert all(line.split(":")[0] in printed.out for line in written["absent"])


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--repeats", "0"], ["--threads", "0"]])
def test_a_wrong_flag_is_explained(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_an_interrupt_still_shows_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(kernels: Kernels, plan: bench.Plan, groups: list[str]) -> Iterator[KernelRow]:
        yield from rows
        raise KeyboardInterrupt

    rows = list(bench.run(active(), tiny_plan(), ["experts"]))
    monkeypatch.setattr(bench, "run", interrupted)
    assert main(["bench", "kernels", "--quick", "--json", str(tmp_path / "rows.json")]) == 130
    assert capsys.readouterr().out.count("experts-w4a4") == len(rows)
    assert not (tmp_path / "rows.json").exists()
