"""Arms take turns, rotate through their calls, and are summed up per call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte.bench.buffers import cache_bytes, copies, rotation_bytes
from halfbyte.bench.timing import Arm, Timing, interleave


class Clock:
    """Time that passes only where a call says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds
            self.log.append(name)

        return run


def test_rounds_run_forwards_and_backwards_in_turn() -> None:
    clock = Clock()
    arms = [Arm(name, [clock.call(name, 1.0)]) for name in "abc"]
    interleave(arms, repeats=4, minimum=0.5, limit=100, clock=clock)
    assert "".join(clock.log[6:]) == "abc" + "cba" + "abc" + "cba"
    assert "".join(clock.log[:6]) == "aabbcc"  # warm-up, and the call that tells how many make a sample


def test_every_call_of_a_rotation_has_its_turn() -> None:
    clock = Clock()
    arm = Arm("arm", [clock.call(str(i), 1.0) for i in range(3)])
    interleave([arm], repeats=5, minimum=2.0, limit=100, clock=clock)
    warm, rest = clock.log[:3], clock.log[3:]
    assert warm == ["0", "1", "2"]
    assert rest == [str(i % 3) for i in range(1 + 5 * 2)]


def test_times_are_per_call_whatever_the_sample_holds() -> None:
    clock = Clock()
    arms = [Arm("slow", [clock.call("s", 0.5)]), Arm("fast", [clock.call("f", 0.001)])]
    slow, fast = interleave(arms, repeats=4, minimum=0.1, limit=100, clock=clock)
    assert slow.median == pytest.approx(0.5)
    assert fast.median == pytest.approx(0.001)
    assert clock.log.count("f") >= 4 * 99


def test_no_round_begins_after_the_limit_but_three_always_do() -> None:
    clock = Clock()
    arms = [Arm(name, [clock.call(name, 1.0)]) for name in "ab"]
    assert len(interleave(arms, repeats=50, minimum=0.1, limit=10.5, clock=clock)[0].seconds) == 6
    assert len(interleave(arms, repeats=50, minimum=0.1, limit=0.0, clock=clock)[0].seconds) == 3
    assert len(interleave(arms, repeats=2, minimum=0.1, limit=0.0, clock=clock)[0].seconds) == 2


def test_median_and_quartiles() -> None:
    timing = Timing((5.0, 1.0, 4.0, 2.0, 3.0))
    assert timing.median == 3.0
    assert timing.quartiles == (2.0, 4.0)
    assert Timing((2.0,)).quartiles == (2.0, 2.0)


def test_copies_exceed_the_budget_and_are_different_objects() -> None:
    made = copies([0], 100, 1000, lambda: [0])
    assert len(made) * 100 > 1000
    assert (len(made) - 1) * 100 <= 1000
    assert len({id(item) for item in made}) == len(made)
    assert len(copies([0], 5000, 1000, lambda: [0])) == 1


def test_the_largest_cache_is_read(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "2048K", "3M", "odd")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert cache_bytes(tmp_path) == 3 * 2**20
    assert cache_bytes(tmp_path / "none") is None
    assert 0 < rotation_bytes() <= 512 * 2**20
