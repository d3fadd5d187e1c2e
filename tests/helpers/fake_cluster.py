"""A cluster without Ray: actors are objects here, results come and workers die as a script says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from halfbyte.models.precision import PRESETS
from halfbyte.models.trajectory import Trajectory
from halfbyte.train.ray.cluster import WorkerDied
from halfbyte.train.ray.messages import Bundle, Hello, Played

Answer = Callable[["FakeActor", str], Any]  # (actor, call) -> None to do it, "die", or "wait"


class FakeActor:
    """Plays bundles by a formula."""

    def __init__(self, cluster: FakeCluster, name: str) -> None:
        self.cluster, self.name, self.alive = cluster, name, True
        self.open = _Method(self, "open")
        self.play = _Method(self, "play")
        self.follow = _Method(self, "follow")

    def do(self, call: str, arguments: tuple[Any, ...]) -> Any:
        if call == "open":
            return Hello("here", 1, 0, "none")
        if call == "follow":
            return 0.0
        bundle: Bundle = arguments[0]
        assert len(bundle.prompts) == len(bundle.keys) == len(bundle.pieces)
        drawn = [
            [formula(key, piece.group, index) for _, index in piece.samples()]
            for piece, key in zip(bundle.pieces, bundle.keys)
        ]
        self.cluster.bundles.append(bundle)
        return Played(drawn, seconds=1.0, tokens=sum(map(len, drawn)))


def formula(key: int, group: int, index: int) -> Trajectory:
    """The sample that every worker draws for (key, group, index)."""
    ids = np.array([key % 1000, group, index], np.int32)
    from halfbyte.models.trajectory import SamplingParams

    return Trajectory(
        ids, ids, np.zeros(3, np.float32), np.ones(3, bool), ids, SamplingParams(), PRESETS["bf16"], "eos", group, index
    )


class _Method:
    def __init__(self, actor: FakeActor, name: str) -> None:
        self.actor, self.name = actor, name

    def remote(self, *arguments: Any) -> Ref:
        return self.actor.cluster.due(self.actor, self.name, arguments)


class Ref:
    """A result that is due."""

    def __init__(self, actor: FakeActor, call: str, arguments: tuple[Any, ...]) -> None:
        self.actor, self.call, self.arguments = actor, call, arguments


class FakeCluster:
    """See the module's docstring.

    Arguments:
        answer: decides what becomes of a call when its result is looked for.
    """

    alone = True
    address = "127.0.0.1"

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer = answer or (lambda actor, call: None)
        self.now = 0.0
        self.started: list[str] = []
        self.killed: list[str] = []
        self.options: list[dict[str, Any]] = []
        self.bundles: list[Bundle] = []
        self._fate: dict[Ref, Any] = {}
        self._pending: list[Ref] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def actor(self, kind: type, options: dict[str, Any], name: str) -> FakeActor:
        self.started.append(name)
        self.options.append(options)
        return FakeActor(self, name)

    def call(self, method: _Method, group: str, *arguments: Any) -> Ref:
        return method.remote(*arguments)

    def due(self, actor: FakeActor, call: str, arguments: tuple[Any, ...]) -> Ref:
        ref = Ref(actor, call, arguments)
        self._pending.append(ref)
        return ref

    def wait(self, refs: Sequence[Ref], seconds: float) -> list[Ref]:
        self.now += max(seconds, 0.01)
        for ref in list(self._pending):
            if ref not in refs:
                continue
            fate = self.answer(ref.actor, ref.call) if ref.actor.alive else "die"
            if fate == "wait":
                continue
            if fate == "die":
                ref.actor.alive = False
            self._fate[ref] = fate
            self._pending.remove(ref)
        return [ref for ref in refs if ref in self._fate]

    def value(self, ref: Ref) -> Any:
        fate = self._fate[ref]
        if fate == "die":
            raise WorkerDied("killed by the test")
        if isinstance(fate, BaseException):
            raise fate
        return ref.actor.do(ref.call, ref.arguments)

    def kill(self, actor: FakeActor) -> None:
        actor.alive = False
        self.killed.append(actor.name)

    def check(self) -> None:
        """The head is there."""

    def offers(self) -> str:
        return "CPU 0"

    def close(self) -> None:
        """Nothing to end."""
