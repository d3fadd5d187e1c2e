"""The numbers of a diagnosis, against a loop over tokens; and the command."""

from __future__ import annotations

import json
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfbyte.cli.main import main
from halfbyte.config import ObjectiveConfig
from halfbyte.diagnosis import TokenTable, diagnose, segmentation
from halfbyte.errors import ConfigError
from halfbyte.objective import CORRECTIONS, make_correction, make_segmenter


def table(samples: int = 60, length: int = 80, seed: int = 0, *, damaged: float = 0.0) -> TokenTable:
    """Log-normal noise; ``damaged`` of the samples with a negative advantage have a run of 30 tokens with g < 0."""
    draws = np.random.default_rng(seed)
    total = samples * length
    rollout = -draws.gamma(0.6, 1.0, total)
    gap = draws.normal(0, 0.02, total) * (1 - np.exp(rollout))
    advantage = draws.normal(size=samples)
    for i in range(samples):
        if advantage[i] < 0 and draws.random() < damaged:
            start = i * length + int(draws.integers(0, length - 30))
            gap[start : start + 30] -= draws.exponential(0.8, 30)
    mask = draws.random(total) < 0.95
    learner = np.where(mask, rollout + gap, np.nan)
    return TokenTable(
        step=None,
        lengths=np.full(samples, length),
        ids=draws.integers(0, 31, total),
        rollout_logp=rollout.astype(np.float32),
        learner_logp=learner.astype(np.float32),
        advantages=np.repeat(advantage, length).astype(np.float32),
        mask=mask,
    )


def test_quadrants_equal_a_loop_over_tokens() -> None:
    given = table(damaged=0.3)
    found = diagnose(given, compare=()).numbers
    mass: dict[str, float] = {}
    count: dict[str, int] = {}
    size: dict[str, float] = {}
    total_mass, tokens = 0.0, 0
    for r, t, a, m in zip(given.rollout_logp, given.learner_logp, given.advantages, given.mask):
        if not m:
            continue
        gap = float(np.float32(t) - np.float32(r))
        tokens += 1
        total_mass += abs(float(a))
        if gap and a:
            name = f"{'neg' if a < 0 else 'pos'}_{'neg' if gap < 0 else 'pos'}"
            mass[name] = mass.get(name, 0.0) + abs(float(a))
            count[name] = count.get(name, 0) + 1
            size[name] = size.get(name, 0.0) + abs(gap)
    for name, value in mass.items():
        assert found[f"quadrant/mass_{name}"] == pytest.approx(value / total_mass, rel=1e-6)
        assert found[f"quadrant/share_{name}"] == pytest.approx(count[name] / tokens, rel=1e-9)
        assert found[f"quadrant/gap_{name}"] == pytest.approx(size[name] / count[name], rel=1e-5)
    assert found["gap/tokens"] == tokens


def test_planted_damage_is_seen_and_noise_is_not() -> None:
    fixed = make_segmenter("fixed")
    clean, hurt = (diagnose(table(damaged=d), segmenter=fixed) for d in (0.0, 0.6))
    assert clean.numbers["segment/over_threshold"] == 0.0
    assert not clean.selected.any()
    assert abs(clean.numbers["quadrant/amplification"]) < 0.1
    assert hurt.numbers["segment/over_threshold"] > 0.05
    assert hurt.numbers["quadrant/amplification"] > 0.5
    gap = hurt.table.gap
    inside, outside = np.abs(gap[hurt.selected]).mean(), np.abs(gap[hurt.table.mask & ~hurt.selected]).mean()
    assert inside > 3 * outside
    assert (hurt.weights[hurt.selected] != 1).mean() > 0.5


def test_effects_are_those_of_the_corrections() -> None:
    given = table(damaged=0.5)
    found = diagnose(given, correction=make_correction("token_tis"))
    assert found.effects.keys() == CORRECTIONS.keys()
    assert found.effects["none"].mass_kept == 1.0
    assert found.effects["none"].changed == 0.0
    expected = np.minimum(np.exp(given.gap.astype(np.float64)), 2.0)[given.mask]
    np.testing.assert_allclose(found.weights[given.mask], expected, rtol=1e-5)
    weight = np.abs(given.advantages[given.mask]).astype(np.float64)
    assert found.effects["token_tis"].mass_kept == pytest.approx((expected * weight).sum() / weight.sum(), rel=1e-5)


def test_versions_split_the_gap_into_current_and_stale() -> None:
    given = table()
    versions = np.repeat(np.arange(60) % 2, 80)
    moved = np.where(versions == 0, given.learner_logp - 0.5, given.learner_logp).astype(np.float32)
    fresh = TokenTable(
        step=None,
        lengths=given.lengths,
        ids=given.ids,
        rollout_logp=given.rollout_logp,
        learner_logp=moved,
        advantages=given.advantages,
        mask=given.mask,
        versions=versions,
    )
    found = diagnose(fresh, compare=()).numbers
    assert found["split/stale_tokens"] == pytest.approx((versions[given.mask] == 0).mean())
    assert found["split/stale_mean_abs"] == pytest.approx(0.5, abs=0.01)
    assert found["split/current_mean_abs"] < 0.02


def test_delimiters_come_from_the_tokenizer() -> None:
    segmenter, rule = segmentation("delimiter", "tiny")
    assert segmenter.name == "delimiter"
    assert rule is not None
    assert rule(np.array([2, 30, 19, 29, 28])).tolist() == [False, True, True, True, True]  # 0 newline . : ?
    assert segmentation(None, None)[0].name == ObjectiveConfig().segmenter
    with pytest.raises(ConfigError, match="--tokenizer"):
        segmentation("delimiter", None)


def test_a_million_tokens_take_less_than_a_second_of_one_thread() -> None:
    given = table(samples=2000, length=500, damaged=0.2)
    fixed = make_segmenter("fixed")
    times = []
    for _ in range(3):
        start = time.process_time()
        diagnose(given, segmenter=fixed, compare=())
        times.append(time.process_time() - start)
    assert min(times) < 1.0


class Leaves(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))


def write_dump(path: Path) -> Path:
    lines = []
    for step in (1, 2, 3):
        given = table(samples=24, seed=step, damaged=0.3 * step)
        for i in range(24):
            part = slice(80 * i, 80 * (i + 1))
            learner = [None if not m else float(x) for x, m in zip(given.learner_logp[part], given.mask[part])]
            lines.append(
                {
                    "step": step,
                    "responses": given.ids[part].tolist(),
                    "rollout_log_probs": given.rollout_logp[part].tolist(),
                    "old_log_probs": learner,
                    "advantages": float(given.advantages[part][0]),
                    "response_mask": given.mask[part].astype(int).tolist(),
                    "reward": float(given.advantages[part][0] > 0),
                }
            )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_command_writes_numbers_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = write_dump(tmp_path / "<b>dump.jsonl")
    out, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    assert main(["diagnose", str(dump), "--out", str(out), "--json", str(numbers)]) == 0
    printed = capsys.readouterr().out
    assert "(-, -)" in printed
    assert "amplifies the gap" in printed
    rows = json.loads(numbers.read_text())
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[2]["corrections"].keys() == CORRECTIONS.keys()
    assert all(0 <= row["segment/over_threshold"] <= 1 for row in rows)
    text = out.read_text()
    page = Leaves(text)
    assert sum(tag == "svg" for tag, _ in page.tags) == 6
    assert any(tag == "rect" and dict(a).get("class") == "outline" for tag, a in page.tags)
    assert not any({"src", "href", "onload"} & a.keys() for _, a in page.tags)
    assert "<b>dump" not in text
    assert len(text) < 300_000


def test_the_command_refuses_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = write_dump(tmp_path / "dump.jsonl")
    for flags, message in (
        (["--step", "9"], "there is no step 9"),
        (["--segments", "sentence"], "unknown segmenter"),
        (["--correction", "hope"], "unknown correction"),
        (["--column", "x=y"], "names no column"),
    ):
        assert main(["diagnose", str(dump), *flags]) == 2
        assert message in capsys.readouterr().err
    assert main(["diagnose", str(dump), "--step", "1"]) == 0
    assert main(["diagnose", str(tmp_path / "none")]) == 2
