"""The report: one offline file, whatever state the run folder is in and whatever its texts contain."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import DataError
from halfbyte.report import build
from halfbyte.report.page import flatten, render, visible
from halfbyte.report.records import Record, read_record, read_samples

VOID = {"meta", "br", "hr", "img", "link", "input"}
LEAF_SVG = {"path", "circle", "rect"}


class Page(HTMLParser):
    """Elements, attributes and the text of every <pre>, after checking that tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.pre: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "pre":
            self.pre.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in LEAF_SVG
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] == "pre":
            self.pre[-1] += data

    def titles(self) -> set[str]:
        return set(re.findall(r"[A-Z][^\n]+", self.text))


def train_row(step: int, **values: float) -> dict[str, Any]:
    return {"step": step, "kind": "train", "reward/mean": 0.4 + step / 100, "reward/std": 0.4, **values}


def full_row(step: int) -> dict[str, Any]:
    keys = "accuracy/train gap/mean_abs gap/p99_abs gap/max_abs gap/k3_kl gap/ess entropy/mean length/mean length/max "
    keys += "time/rollout time/reward time/learner time/publish optim/lr optim/grad_norm loss/policy ratio/clipped_low "
    keys += "ratio/clipped_high ratio/clipped_dual tokens/rollout align/code_mismatch align/code_mismatch_guided "
    keys += "align/scale_mismatch align/unguided align/code_mismatch/0/k align/code_mismatch/1/k "
    keys += "segment/over_threshold quadrant/mass_neg_neg quadrant/mass_pos_pos "
    keys += "quadrant/mass_neg_pos quadrant/mass_pos_neg refit/changed refit/bytes"
    return train_row(step, **{key: 0.1 * (i + 1) for i, key in enumerate(keys.split())})


def eval_row(step: int, accuracy: float) -> dict[str, Any]:
    return {
        "step": step,
        "kind": "eval",
        "eval/accuracy": accuracy,
        "eval/accuracy_low": accuracy - 0.05,
        "eval/accuracy_high": accuracy + 0.05,
        "eval/n": 512,
    }


def write_run(folder: Path, rows: list[dict[str, Any]], tail: str = "", **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def write_samples(folder: Path, step: int, samples: list[dict[str, Any]]) -> None:
    (folder / "trajectories").mkdir(exist_ok=True)
    path = folder / "trajectories" / f"step_{step:06d}.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def page(folder: Path) -> Page:
    return Page(build(folder).read_text(encoding="utf-8"))


def test_a_finished_run_shows_every_panel_and_its_result(tmp_path: Path) -> None:
    rows = [eval_row(0, 0.4), *[full_row(step) for step in range(1, 31)], eval_row(30, 0.85)]
    summary = {
        "accuracy_before": 0.4,
        "accuracy_after": 0.85,
        "wall_seconds": 61.5,
        "k3_kl": 2e-4,
        "precision": "w4a4kv4",
    }
    folder = write_run(tmp_path / "demo", rows, summary=summary, config={"train": {"steps": 30, "seed": 7}})
    write_samples(folder, 0, [{"prompt_text": "1+1=", "response_text": "3", "reward": 0.0, "correct": False}])
    tokens = {"logprobs": [-0.1, -2.0], "learner_logprobs": [-0.2, -1.9], "mask": [1, 1], "advantage": -1.0}
    tokens |= {"weights": [0.5, 1.0], "selected": [1, 0]}
    right = {"prompt_text": "1+1=", "response_text": "2", "reward": 1.0, "correct": True}
    write_samples(folder, 29, [right | tokens])
    got = page(folder)
    assert "finished after 30 steps" in got.text
    assert "+45.0" in got.text
    assert "0.350 to 0.450, n = 512" in got.text
    assert "0.800 to 0.900, n = 512" in got.text
    assert sum(tag == "svg" for tag, _ in got.tags) == 24  # one panel has two charts
    assert "Not recorded" not in got.text
    assert got.pre == ["1+1=", "3", "1+1=", "2"]
    assert "train.seed" in got.text


def test_a_run_with_rollouts_in_flight_shows_their_age_and_who_waits(tmp_path: Path) -> None:
    keys = (
        "stale/mean",
        "stale/max",
        "flight/groups",
        "time/idle_learner",
        "time/idle_rollout",
        "time/tokens_per_second",
    )
    rows = [full_row(step) | {key: float(step) for key in keys} for step in range(1, 5)]
    got, without = page(write_run(tmp_path / "a", rows)), page(write_run(tmp_path / "b", [full_row(1), full_row(2)]))
    for title in ("Age of tokens", "Groups in flight", "Waiting", "Throughput"):
        assert title in got.text
        assert title not in without.text
    assert "Rollout speed" in without.text
    assert "New tokens per second of the rollout phase" not in got.text, "its time is not known beside the learner"


def test_the_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [full_row(1), full_row(2)])
    got = page(folder)
    forbidden = {"script", "img", "link", "iframe", "object", "embed", "image", "use", "foreignobject", "base", "a"}
    assert not forbidden & {tag for tag, _ in got.tags}
    for _, attributes in got.tags:
        assert not {"href", "src", "xlink:href", "srcset", "action", "style"} & set(attributes)
        assert not [key for key in attributes if key.startswith("on")]
    text = (folder / "report.html").read_text()
    assert "url(" not in text
    assert "@import" not in text
    assert "//" not in re.sub(r"<!--.*?-->", "", text)


ATTACKS = [
    "<script>alert(1)</script>",
    "</pre></article><h1>gone</h1>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }} {% raw %}",
    "&lt;b&gt; &amp;amp;",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_untrusted_text_stays_text(tmp_path: Path, attack: str) -> None:
    config = {"env": {"name": attack, attack: attack}}
    summary = {"precision": attack, "accuracy_before": attack}
    folder = write_run(
        tmp_path / "r", [{**full_row(1), attack: 1.0}], config=config, summary=summary, environment={attack: [attack]}
    )
    hostile = {"prompt_text": attack, "response_text": attack, "finish_reason": attack, "reward": 1.0, "correct": True}
    write_samples(folder, 1, [hostile])
    plain = page(
        write_run(
            tmp_path / "plain",
            [{**full_row(1), "x": 1.0}],
            config={"env": {"name": "x", "x": "x"}},
            summary={"precision": "x", "accuracy_before": "x"},
            environment={"x": ["x"]},
        )
    )
    got = page(folder)
    assert got.pre == [attack, attack]
    extra = [tag for tag, _ in got.tags if tag in ("script", "img", "b", "h1")]
    assert extra == ["h1", "b"]  # the page's own title and the verdict of the sample
    assert [tag for tag, _ in plain.tags if tag in ("script", "img", "h1")] == ["h1"]
    assert got.text.count(attack) >= 7


@given(st.text(st.characters(codec=None), max_size=60))
def test_any_text_survives_or_is_spelled_out(text: str) -> None:
    shown = visible(text)
    shown.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", shown)
    if text.isprintable():
        assert shown == text


def test_lone_surrogates_and_escape_codes_do_not_break_the_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [full_row(1)])
    write_samples(folder, 1, [{"prompt_text": "\ud800\x1b[31m\u202ereversed", "response_text": "a\tb\nc"}])
    assert page(folder).pre == ["\\ud800\\x1b[31m\\u202ereversed", "a\tb\nc"]


def test_a_killed_run_is_reported_without_its_broken_last_line(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "r", [full_row(1), full_row(2)], tail='{"step": 3, "kind": "tr', config={"train": {"steps": 40}}
    )
    got = page(folder)
    assert "unfinished: 2 of 40 steps" in got.text
    assert "1 unreadable line" in got.text


def test_a_line_cut_inside_a_character_is_skipped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [full_row(1)])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write('{"step": 2, "kind": "train", "note": "é'.encode()[:-1])
    assert read_record(folder).broken_lines == 1


@pytest.mark.parametrize(
    "line", ["[1, 2]", "null", '"text"', '{"kind": "train"}', '{"step": "3"}', '{"step": true}', "[" * 100_000]
)
def test_lines_that_are_no_record_are_counted(tmp_path: Path, line: str) -> None:
    record = read_record(write_run(tmp_path / "r", [full_row(1)], tail=line + "\n"))
    assert record.broken_lines == 1
    assert [step for step, _ in record.train] == [1]


def test_values_that_are_not_finite_leave_a_gap(tmp_path: Path) -> None:
    rows = [train_row(1, x=1.0), train_row(2, x=float("nan")), train_row(3, x=float("inf")), train_row(4, x=2.0)]
    folder = write_run(
        tmp_path / "r", rows, tail='{"step": 5, "kind": "train", "x": "many", "y": true, "z": 1' + "0" * 400 + "}\n"
    )
    assert read_record(folder).series("x") == [(1.0, 1.0), (4.0, 2.0)]
    assert read_record(folder).train[-1] == (5, {})
    assert "NaN" not in build(folder).read_text()


def test_a_step_computed_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    rows = [train_row(1, x=1.0), train_row(2, x=2.0), train_row(2, x=3.0), eval_row(2, 0.5), eval_row(2, 0.6)]
    record = read_record(write_run(tmp_path / "r", rows))
    assert record.series("x") == [(1.0, 1.0), (2.0, 3.0)]
    assert [row["eval/accuracy"] for _, row in record.evaluations] == [0.6]


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("")
    assert "No step has been recorded yet" in page(folder).text
    write_run(folder, [eval_row(0, 0.4)])
    got = page(folder)
    assert "accuracy before" in got.text
    assert not re.search(r"\bgain\b", got.text)
    assert sum(tag == "svg" for tag, _ in got.tags) == 1


def test_missing_metrics_leave_their_panels_out(tmp_path: Path) -> None:
    got = page(write_run(tmp_path / "r", [train_row(1), train_row(2)]))
    assert sum(tag == "svg" for tag, _ in got.tags) == 1
    assert "Not recorded: Accuracy, sampled, Gap" in got.text


def test_a_parity_run_with_no_gap_at_all_is_drawn(tmp_path: Path) -> None:
    rows = [train_row(step, **{"gap/mean_abs": 0.0, "gap/max_abs": 0.0, "gap/k3_kl": 0.0}) for step in (1, 2, 3)]
    got = page(write_run(tmp_path / "r", rows))
    assert "log scale" not in got.text
    assert sum(tag == "svg" for tag, _ in got.tags) == 3


def test_a_long_run_gives_a_small_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [full_row(step) for step in range(1, 20_001)])
    assert build(folder).stat().st_size < 400_000


def test_damaged_json_files_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [full_row(1)])
    for name in ("config", "environment", "summary"):
        (folder / f"{name}.json").write_text('{"half": ')
    (folder / "trajectories").mkdir()
    (folder / "trajectories" / "step_000001.jsonl").write_text('{"prompt_text": "p", "response_text": "r"}\n{"prompt')
    (folder / "trajectories" / "step_x.jsonl").write_text("{}")
    got = page(folder)
    assert "unfinished" in got.text
    assert got.pre == ["p", "r"]


def test_samples_of_odd_types_are_shown_as_text(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.jsonl"
    path.write_text('{"prompt_text": 3, "response_text": null, "reward": "much", "correct": 1}\n[]\n{}\n')
    first, second = read_samples(path, 5)
    assert (first.prompt, first.response, first.reward, first.correct) == ("3", "", None, None)
    assert second.prompt == ""
    assert read_samples(tmp_path / "none.jsonl", 5) == []


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run folder"):
        build(tmp_path / "none")
    with pytest.raises(DataError, match="not a run"):
        build(tmp_path)
    with pytest.raises(DataError, match="cannot be written"):
        build(write_run(tmp_path / "r", [full_row(1)]), tmp_path / "nowhere" / "report.html")


def test_an_old_report_is_replaced_in_one_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [full_row(1)])
    first = build(folder)
    assert build(folder) == first == folder / "report.html"
    assert sorted(p.name for p in folder.iterdir()) == ["metrics.jsonl", "report.html"]
    other = build(folder, tmp_path / "other.html")
    assert other.read_text() == first.read_text()


def test_the_report_needs_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [full_row(1)])
    code = f"import sys; from halfbyte.report import build; build({str(folder)!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "src"}, check=False).returncode == 0


def test_flatten_gives_dotted_keys() -> None:
    value = {"a": {"b": 1, "c": []}, "d": {}, "e": None, "f": [1, "x"]}
    assert list(flatten(value)) == [("a.b", "1"), ("a.c", "[]"), ("d", "{}"), ("e", ""), ("f", "1, x")]


def test_an_empty_record_renders() -> None:
    assert "No step has been recorded yet" in render(Record(folder=Path("x")))


def test_a_folder_without_metrics_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_mismatch_by_depth_is_drawn_from_the_last_quarter(tmp_path: Path) -> None:
    """x is the layer: three layers and two sites; the value of the last step only, of four."""
    lines = []
    for step in range(1, 5):
        row: dict[str, object] = {"step": step, "kind": "train", "align/code_mismatch": 0.1, "gap/k3_kl": 1e-4}
        for layer in range(3):
            row[f"align/code_mismatch/{layer}/k"] = 0.01 * (layer + 1) * step
            row[f"align/code_mismatch/{layer}/expert_in"] = 0.02
        lines.append(json.dumps(row))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = build(tmp_path).read_text()
    assert "Codes that differ, by depth" in page
    assert "codes of k that differ, from layer 0 on: 0.04 to 0.12" in page
