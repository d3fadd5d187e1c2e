"""The thread policy: what is set, what is left alone, and that it is in force when torch loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.cli import threads
from halfbyte.errors import ConfigError

ROOT = Path(__file__).parents[2]


def applied(count: int | None = None, **environment: str) -> dict[str, str]:
    threads.apply(count, environment)
    return environment


def test_threads_do_not_spin_and_fill_the_usable_cores() -> None:
    assert applied() == {
        "OMP_NUM_THREADS": str(threads.usable_cores()),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


@pytest.mark.parametrize("chosen", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}, {"KMP_BLOCKTIME": "1"}])
def test_a_waiting_policy_of_the_user_is_left_alone(chosen: dict[str, str]) -> None:
    got = applied(**chosen)
    del got["OMP_NUM_THREADS"]
    assert got == chosen


@pytest.mark.parametrize(
    ("count", "environment", "expected"),
    [
        (3, {"HALFBYTE_THREADS": "2", "OMP_NUM_THREADS": "1"}, ("3", "3")),
        (None, {"HALFBYTE_THREADS": "2", "OMP_NUM_THREADS": "1"}, ("2", "2")),
        (None, {"HALFBYTE_THREADS": " 2 "}, ("2", "2")),
        (None, {"OMP_NUM_THREADS": "5"}, (None, "5")),
        (None, {"HALFBYTE_THREADS": "", "OMP_NUM_THREADS": "4,2"}, ("", "4,2")),
    ],
)
def test_the_nearest_word_decides(
    count: int | None, environment: dict[str, str], expected: tuple[str | None, str]
) -> None:
    got = applied(count, **environment)
    assert (got.get("HALFBYTE_THREADS"), got["OMP_NUM_THREADS"]) == expected


def test_a_later_argument_replaces_the_default() -> None:
    environment: dict[str, str] = {}
    threads.apply(None, environment)
    threads.apply(1, environment)
    assert environment["OMP_NUM_THREADS"] == environment["HALFBYTE_THREADS"] == "1"


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "²"])
def test_a_count_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HALFBYTE_THREADS"):
        applied(HALFBYTE_THREADS=text)
    with pytest.raises(ConfigError, match="0 threads"):
        applied(0)


@pytest.mark.parametrize(
    ("text", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("nonsense", 8), ("1 0", 8)]
)
def test_a_container_quota_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, cores: int) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    monkeypatch.setattr(threads, "_CGROUP", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert threads.usable_cores() == cores


def test_torch_and_the_native_pool_take_the_count() -> None:
    code = (
        "from halfbyte.cli import threads; threads.apply(); import torch; from halfbyte.kernels import describe; "
        "print(torch.get_num_threads(), describe().get('threads', 1))"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "HALFBYTE_"))}
    env |= {"PYTHONPATH": str(ROOT / "src"), "HALFBYTE_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "1 1\n"


def test_a_count_after_torch_was_loaded_still_holds() -> None:
    code = "import torch; from halfbyte.cli import threads; threads.apply(1); print(torch.get_num_threads())"
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
