"""Ray does not come up at once: on a busy machine it is started again, a head of somebody else's is not waited for."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from halfbyte.errors import ClusterError
from halfbyte.train.ray.cluster import Cluster

SLOW = "The current node timed out during startup. This could happen"


class SlowRay:
    """Times out ``failures`` times, then is there."""

    def __init__(self, failures: int) -> None:
        self.failures, self.calls = failures, list[str]()
        context = SimpleNamespace(gcs_address="127.0.0.1:7")
        self.get_runtime_context = lambda: context

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        self.calls.append(f"init {options['address']}")
        if self.calls.count(self.calls[-1]) <= self.failures:
            raise RuntimeError(SLOW)

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowRay:
    ray, find = SlowRay(0), importlib.import_module
    modules = {"ray": ray, "ray.exceptions": SimpleNamespace()}
    monkeypatch.setattr(importlib, "import_module", lambda name, package=None: modules.get(name) or find(name, package))
    return ray


def test_a_slow_start_is_tried_again_with_nothing_left_of_the_last(slow: SlowRay) -> None:
    slow.failures = 5
    assert Cluster().alone
    assert slow.calls == ["init local", "shutdown"] * 5 + ["init local"]


def test_a_machine_on_which_ray_does_not_start_is_given_up(slow: SlowRay) -> None:
    slow.failures = 1000
    with pytest.raises(ClusterError, match=f"Ray does not start or answer: {SLOW}") as caught:
        Cluster()
    assert caught.value.where == "this machine"
    assert slow.calls.count("init local") == 6


def test_a_head_that_does_not_answer_is_asked_once(slow: SlowRay) -> None:
    slow.failures = 1000
    with pytest.raises(ClusterError) as caught:
        Cluster("10.0.0.5:6379")
    assert caught.value.where == "10.0.0.5:6379"
    assert slow.calls == ["init 10.0.0.5:6379"]
