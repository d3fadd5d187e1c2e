"""The refit bench: rivals against their layouts, rows of a known update, the link against the cost model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.bench import refit as bench
from halfbyte.bench.fp4_deltas import fp4_rows
from halfbyte.bench.link import adam_like_step, race, step_of_rate, throttled
from halfbyte.bench.refit_traces import AdamTrace, to_bf16
from halfbyte.bench.rivals import RIVALS
from halfbyte.errors import DataError
from halfbyte.refit.arrays import TensorInfo
from halfbyte.refit.publisher import Publisher, PublishOptions
from halfbyte.refit.store import FilesystemStore


@given(st.integers(0, 2**32), st.sampled_from([0, 1, 700, 70_000, 200_000]), st.sampled_from([0.0, 1e-4, 0.05, 1.0]))
@settings(max_examples=40, deadline=None)
def test_every_rival_gives_the_target_back(seed: int, size: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 2**16, size, dtype=np.uint16)
    target = np.where(rng.random(size) < share, rng.integers(0, 2**16, size), base).astype(np.uint16)
    for rival in RIVALS:
        payload = rival.encode(base, target)
        assert np.array_equal(rival.apply(base.copy(), payload), target), rival.name
        assert rival.size(payload) == len(payload)


def test_the_rivals_are_the_layouts_they_are_named_after() -> None:
    base, target = AdamTrace(1 << 20, 1e-6, 0.2).step()
    changed = np.flatnonzero(base != target)
    by_name = {rival.name: rival for rival in RIVALS}
    assert by_name["int32 + value"].size(by_name["int32 + value"].encode(base, target)) == 6 * len(changed)
    dense = by_name["dense XOR + zstd"].encode(base, target)
    assert np.array_equal(np.frombuffer(zstandard.decompress(dense), np.uint16), base ^ target)
    # bytes a change as measured elsewhere at 1.2% (docs/refit.md): 2.77 and 1.76
    assert len(dense) / len(changed) == pytest.approx(2.77, rel=0.03)
    assert len(by_name["u16 gap + XOR + zstd"].encode(base, target)) / len(changed) == pytest.approx(1.76, rel=0.05)


def test_a_row_says_what_was_measured() -> None:
    base = np.arange(1000, dtype=np.uint16)
    target = base.copy()
    target[[3, 500]] ^= 1
    trace = bench.Trace("two", lambda: iter([(base, target), (target, base)]))
    contestants, _ = bench.schemes(("fast", "max"))
    rows = {row.scheme: row for row in bench.measure(trace, contestants, repeats=2)}
    assert {"halfbyte fast", "halfbyte max", "int32 + value"} <= rows.keys()
    for row in rows.values():
        assert (row.updates, row.elements, row.exact) == (2, 1000, True)
        assert row.change_rate == pytest.approx(0.002)
        assert min(row.encode_gb_per_s, row.apply_gb_per_s) > 0
        needed = {"scheme", "change_rate", "bytes_per_change", "encode_gb_per_s", "apply_gb_per_s", "exact"}
        assert needed <= row.to_json().keys()
    assert rows["int32 + value"].bytes_per_change == 6.0


def test_a_codec_that_is_wrong_is_shown_as_wrong() -> None:
    base, target = AdamTrace(4096, 1e-5, 0.5).step()
    from halfbyte.bench.rivals import Rival

    liar = Rival("liar", lambda a, b: b"", lambda data, payload: data)
    (row,) = bench.measure(bench.Trace("t", lambda: iter([(base, target)])), [liar], repeats=1)
    assert not row.exact


def test_versions_of_a_store_are_its_trace(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    versions = [rng.integers(0, 2**16, 500, dtype=np.uint16)]
    for _ in range(4):
        versions.append(np.where(rng.random(500) < 0.1, versions[-1] ^ 1, versions[-1]).astype(np.uint16))
    infos = {"w": TensorInfo("w", "BF16", (500,)), "n": TensorInfo("n", "F32", (2,))}
    publisher = Publisher(FilesystemStore(tmp_path / "run" / "refit"), "r", options=PublishOptions(anchor_every=2))
    for version in versions:
        publisher.publish({"w": version, "n": np.ones(2, np.float32)}, infos=infos)
    for folder in (tmp_path / "run", tmp_path / "run" / "refit"):
        trace = list(bench.traces(16, folder))[-1]
        pairs = list(trace.steps())
        assert len(pairs) == 4
        for (before, after), a, b in zip(pairs, versions, versions[1:]):
            assert np.array_equal(before, a)
            assert np.array_equal(after, b)
    with pytest.raises(DataError, match="no updates"):
        list(bench.traces(16, tmp_path))


def test_fp4_coordinates_with_stable_scales_cost_a_hundredth_of_a_bit() -> None:
    base, target = AdamTrace(1 << 21, 1.2e-6, 0.75).step()
    rows = {(row.rule, row.policy): row for row in fp4_rows(base, target)}
    assert 0.028 < rows["amax", "recompute"].change_rate < 0.034
    for key in (("amax", "frozen"), ("amax", "hysteretic"), ("power of two", "hysteretic")):
        assert rows[key].bits_per_parameter <= 0.01
        assert rows[key].avalanches == 0
        assert rows[key].relative_error < 1.01
    assert rows["amax", "recompute"].avalanches == 2
    assert rows["amax", "recompute"].bits_per_parameter > 10 * rows["amax", "frozen"].bits_per_parameter


@pytest.mark.parametrize("rate", [0.01, 0.03, 0.2])
def test_the_synthetic_step_changes_the_share_it_is_asked_for(rate: float) -> None:
    rng = np.random.default_rng(3)
    bits = to_bf16(rng.standard_normal(1 << 19, np.float32) * np.float32(0.02))
    after = adam_like_step(bits, step_of_rate(bits, rate), rng)
    assert (after != bits).mean() == pytest.approx(rate, rel=0.1)


def test_a_throttled_server_keeps_its_rate(tmp_path: Path) -> None:
    import time
    import urllib.request

    (tmp_path / "object").write_bytes(bytes(400_000))
    with throttled(tmp_path, 1e6) as (address, bucket):
        started = time.monotonic()
        with urllib.request.urlopen(f"{address}/object") as answer:
            assert len(answer.read()) == 400_000
        assert time.monotonic() - started > 0.35
        assert bucket.sent == 400_000
        with pytest.raises(Exception, match="404"):
            urllib.request.urlopen(f"{address}/../secret")


def test_the_cost_model_predicts_real_refits_over_a_slow_link() -> None:
    """16 MB over a link that takes 60 s for all of it: seconds by phase against the clock."""
    for row in race(16_000_000, rates=(0.01, 0.05), full_seconds=60.0):
        found: Any = row.to_json()
        assert row.exact
        assert row.refit_seconds == pytest.approx(row.predicted_seconds, rel=0.35, abs=0.3), found
        assert row.pause_seconds < 0.3
        assert row.speedup > (20 if row.change_rate > 0.02 else 40)


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["fast", "max"])
def test_speed_up_over_a_full_transfer_at_a_500th_of_the_size_a_second(profile: Any) -> None:
    """Issue 4: above 60 times at 3% and a pause below .3 s. The rate scales with the size; compare and apply are measured too."""
    needed = {"max": (150, 60, 38), "fast": (90, 45, 30)}[profile]
    rows = list(race(64_000_000, profile=profile))
    for row, least in zip(rows, needed, strict=True):
        assert row.exact
        assert row.speedup > least, row
        assert row.pause_seconds < 0.3
