"""A target that fails serves its old version and takes the next; ties have a policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from refit_case import OPTIONS, EngineHooks, Trainer, arrays_target, publish_versions, same, zeros_like

from halfbyte.refit.errors import (
    LayoutError,
    StoreUnavailableError,
    TargetError,
)
from halfbyte.refit.keys import manifest_key
from halfbyte.refit.manifest import Manifest
from halfbyte.refit.patch import Update
from halfbyte.refit.publisher import Publisher
from halfbyte.refit.store import MemoryStore
from halfbyte.refit.store.faults import Fault, FaultyStore
from halfbyte.refit.subscriber import Subscriber

# ---- a target that fails


class Moody:
    """A target that fails once, at a named call, perhaps after half of its work."""

    survives = False

    def __init__(self, inner: Any, call: str, *, half: bool = False, error: BaseException | None = None) -> None:
        self.inner, self.call, self.half, self.left = inner, call, half, 1
        self.error = error or RuntimeError("out of memory")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name != self.call or not self.left:
            return found

        def fail(update: Update | None = None) -> None:
            self.left -= 1
            if self.half:
                found(replace(update, changes=update.changes[: len(update.changes) // 2]))
            raise self.error

        return fail


@pytest.mark.parametrize(("call", "half"), [("stage", False), ("pause", False), ("commit", False), ("commit", True)])
def test_a_target_that_fails_serves_its_old_version_and_takes_the_next(trainer: Trainer, call: str, half: bool) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 1)
    hooks = EngineHooks()
    inner = arrays_target(trainer.weights, hooks=hooks)
    target = Moody(inner, call, half=half)
    target.left = 0
    subscriber = Subscriber(store, target)
    subscriber.refit()
    old, held = trainer.copy(), subscriber.held
    trainer.step()
    publisher.publish(trainer.weights)
    target.left = 1
    hooks.events.clear()
    with pytest.raises(TargetError, match="out of memory"):
        subscriber.refit()
    assert same(inner.arrays, old)
    assert inner.stamp() == subscriber.held == held
    assert hooks.events[-1:] in ([], ["resume"])
    refit = subscriber.refit()
    assert refit.kinds == ("delta",)
    assert same(inner.arrays, trainer.weights)


def test_modelexpress_713_a_failure_before_any_change_leaves_no_state_behind(trainer: Trainer) -> None:
    """Staging fails five times; nothing is stuck in "updating", and the engine never pauses."""
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 1)
    hooks = EngineHooks()
    inner = arrays_target(trainer.weights, hooks=hooks)
    target = Moody(inner, "stage")
    target.left = 0
    subscriber = Subscriber(store, target)
    subscriber.refit()
    hooks.events.clear()
    trainer.step()
    publisher.publish(trainer.weights)
    target.left = 5
    for _ in range(5):
        with pytest.raises(TargetError):
            subscriber.refit()
    assert hooks.events == []
    assert subscriber.refit().kinds == ("delta",)


def test_nemo_rl_3274_a_failed_refit_leaves_nothing_to_be_applied_twice(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 1)
    inner = arrays_target(trainer.weights)
    target = Moody(inner, "commit", half=True)
    target.left = 0
    subscriber = Subscriber(store, target)
    subscriber.refit()
    for _ in range(3):
        trainer.step()
        publisher.publish(trainer.weights)
        target.left = 2
        for _ in range(2):
            with pytest.raises(TargetError):
                subscriber.refit()
        subscriber.refit()
        assert same(inner.arrays, trainer.weights)


def test_a_target_that_cannot_even_go_back_stays_paused_until_it_is_repaired(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 1)
    hooks = EngineHooks()
    inner = arrays_target(trainer.weights, hooks=hooks)
    subscriber = Subscriber(store, inner)
    subscriber.refit()
    hooks.events.clear()
    trainer.step()
    publisher.publish(trainer.weights)
    broken = Moody(Moody(inner, "commit", half=True), "rollback")
    subscriber.target = broken
    with pytest.raises(TargetError, match="stays paused"):
        subscriber.refit()
    assert hooks.events == ["pause"]
    refit = subscriber.refit()
    assert refit.kinds == ("delta",)
    assert same(inner.arrays, trainer.weights)
    assert hooks.events[-1] == "resume"


def test_an_interrupt_in_the_pause_takes_the_update_back(trainer: Trainer) -> None:
    store = MemoryStore()
    publisher = publish_versions(store, trainer, 1)
    inner = arrays_target(trainer.weights)
    subscriber = Subscriber(store, inner)
    subscriber.refit()
    old = trainer.copy()
    trainer.step()
    publisher.publish(trainer.weights)
    subscriber.target = Moody(inner, "commit", half=True, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        subscriber.refit()
    assert same(inner.arrays, old)
    subscriber.refit()
    assert same(inner.arrays, trainer.weights)


def test_everything_slow_happens_before_the_pause(trainer: Trainer) -> None:
    """Between pause and resume the store is not touched."""
    memory = MemoryStore()
    publisher = publish_versions(memory, trainer, 1)
    store = FaultyStore(memory)
    hooks = EngineHooks()
    target = arrays_target(trainer.weights, hooks=hooks)
    subscriber = Subscriber(store, target)
    subscriber.refit()
    trainer.step()
    publisher.publish(trainer.weights)
    marks: list[int] = []
    hooks.pause = lambda: marks.append(len(store.operations))
    hooks.resume = lambda: marks.append(len(store.operations))
    refit = subscriber.refit()
    assert marks[0] == marks[1] > 5
    assert 0 < refit.pause_seconds < refit.prepare_seconds


def test_following_goes_on_after_errors(trainer: Trainer) -> None:
    memory = MemoryStore()
    publisher = publish_versions(memory, trainer, 1)
    broken = [True]
    store = FaultyStore(memory, lambda op: Fault(503) if broken[0] else None)
    target = arrays_target(zeros_like(trainer.weights))
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            broken[0] = False
        if len(naps) == 3:
            trainer.step()
            publisher.publish(trainer.weights)

    subscriber = Subscriber(store, target, sleep=sleep)
    events = subscriber.follow(interval=0.5)
    assert [type(next(events)).__name__ for _ in range(4)] == ["StoreUnavailableError"] * 2 + ["Refit"] * 2
    assert same(target.arrays, trainer.weights)
    broken[0] = True
    with pytest.raises(StoreUnavailableError):
        list(subscriber.follow(patience=2))


# ---- ties


def test_miles_1235_a_tied_tensor_is_published_once() -> None:
    store = MemoryStore()
    embed = np.arange(600, dtype=np.float32).reshape(30, 20)
    weights = {"embed": embed, "lm_head": embed, "other": np.ones(5, np.float32)}
    publisher = Publisher(store, "run", options=OPTIONS)
    publisher.publish(weights)
    tied = arrays_target({"embed": embed, "other": weights["other"]})
    copies = arrays_target(weights)  # holds both names apart
    head_only = arrays_target({"lm_head": embed, "other": weights["other"]})
    readers = [Subscriber(store, t, name=f"r{n}") for n, t in enumerate((tied, copies, head_only))]
    for _ in range(3):
        for reader in readers:
            reader.refit()
        embed[::3] += 1
        publisher.publish(weights)
    for reader in readers:
        reader.refit()
    manifest = Manifest.from_bytes(store.get(manifest_key(publisher.head.manifest)))
    assert [c.info.name for c in manifest.tensors] == ["embed"]
    assert manifest.aliases == {"lm_head": "embed"}
    for target, name in ((tied, "embed"), (copies, "embed"), (copies, "lm_head"), (head_only, "lm_head")):
        assert target.arrays[name].tobytes() == embed.tobytes()


def test_skyrl_a_tied_head_missing_in_the_base_is_an_error_without_a_policy() -> None:
    store = MemoryStore()
    embed = np.arange(60, dtype=np.float32)
    with pytest.raises(LayoutError, match="lm_head = embed"):
        Publisher(store, "run", options=replace(OPTIONS, ties="refuse")).publish({"embed": embed, "lm_head": embed})
    publisher = Publisher(store, "run", options=replace(OPTIONS, ties="separate"))
    publisher.publish({"embed": embed, "lm_head": embed})
    target = arrays_target({"embed": np.zeros(60, np.float32)})
    with pytest.raises(LayoutError, match="'lm_head'"):
        Subscriber(store, target).refit()
    assert not target.arrays["embed"].any()


def test_tensors_that_overlap_in_part_are_refused() -> None:
    fused = np.zeros((30, 4), np.float32)
    with pytest.raises(LayoutError, match="share a part of their memory"):
        Publisher(MemoryStore(), "run").publish({"qkv": fused, "q": fused[:10]})


def test_torch_ties_are_found_by_their_memory() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.zeros(8, 4)
    from halfbyte.refit.ties import find_ties

    assert find_ties({"a": weight, "b": torch.zeros(8, 4), "c": weight, "d": torch.nn.Parameter(weight)}) == {
        "c": "a",
        "d": "a",
    }
