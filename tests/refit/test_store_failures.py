"""A store that fails, damages, forgets: nothing is lost and nothing wrong reaches a target."""

from __future__ import annotations

from typing import Any

import pytest
from refit_case import OPTIONS, Trainer, arrays_target, publish_versions, same, zeros_like

from halfbyte.errors import RefitError
from halfbyte.refit.errors import (
    CorruptError,
    FencedError,
    StoreConflictError,
    StoreUnavailableError,
)
from halfbyte.refit.manifest import Signer
from halfbyte.refit.publisher import Publisher
from halfbyte.refit.store import MemoryStore
from halfbyte.refit.store.faults import Fault, FaultyStore, Operation
from halfbyte.refit.subscriber import Subscriber

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- a store that fails


def test_slime_2104_prime_rl_3386_the_baseline_waits_for_the_store(trainer: Trainer) -> None:
    """A publication fails; the next one still carries its changes."""
    broken = [False]
    store = FaultyStore(MemoryStore(), lambda op: Fault(503) if broken[0] and op.kind in ("put", "swap") else None)
    publisher = publish_versions(store, trainer, 2)
    target = arrays_target(trainer.weights)
    subscriber = Subscriber(store, target)
    subscriber.refit()
    trainer.step()
    broken[0] = True
    with pytest.raises(StoreUnavailableError):
        publisher.publish(trainer.weights)
    broken[0] = False
    trainer.step()
    done = publisher.publish(trainer.weights)
    assert done.stamp.version == 2
    subscriber.refit()
    assert same(target.arrays, trainer.weights)


def count_operations(trainer: Trainer) -> int:
    store = FaultyStore(MemoryStore())
    publish_versions(store, trainer, 3)
    return len(store.operations)


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (409, False),
        (503, True),
        *(
            pytest.param(error, after, marks=pytest.mark.slow)
            for error in (403, 409, 412, 503)
            for after in (False, True)
            if (error, after) not in ((409, False), (503, True))
        ),
    ],
)
def test_a_store_error_at_any_operation_loses_nothing(error: int, after: bool) -> None:
    """Every operation of three publications, each with every kind of error, before and after it happened."""
    for number in range(count_operations(Trainer(size=12))):
        trainer, memory = Trainer(size=12), MemoryStore()
        fault = Fault(error, after=after)
        store = FaultyStore(memory, lambda op, number=number, fault=fault: fault if op.number == number else None)
        publisher = None
        target = arrays_target(zeros_like(trainer.weights))
        subscriber = Subscriber(memory, target)
        for _ in range(4):
            try:
                publisher = publisher or Publisher(store, "run", options=OPTIONS)
                publisher.publish(trainer.weights)
            except FencedError:
                publisher = None  # an open whose answer was lost: open again
                continue
            except RefitError:
                pass
            else:
                subscriber.refit()
                assert same(target.arrays, trainer.weights), number
            trainer.step()
        publisher = publisher or Publisher(store, "run", options=OPTIONS)
        publisher.publish(trainer.weights)
        subscriber.refit()
        assert same(target.arrays, trainer.weights), number


def test_a_swap_whose_answer_was_lost_is_found_again(trainer: Trainer) -> None:
    lost = [False]
    memory = MemoryStore()
    store = FaultyStore(memory, lambda op: Fault(503, after=True) if lost[0] and op.kind == "swap" else None)
    publisher = publish_versions(store, trainer, 1)
    trainer.step()
    lost[0] = True
    with pytest.raises(StoreUnavailableError):
        publisher.publish(trainer.weights)
    lost[0] = False
    trainer.step()
    assert publisher.publish(trainer.weights).stamp.version == 2  # version 1 was published after all
    target = arrays_target(zeros_like(trainer.weights))
    Subscriber(memory, target).refit()
    assert same(target.arrays, trainer.weights)


def test_a_swap_that_comes_through_after_it_was_given_up(trainer: Trainer) -> None:
    """A request that was delayed for minutes lands between two publications: no version gets two contents."""
    late: list[bytes] = []
    memory = MemoryStore()

    class Delaying(FaultyStore):
        def swap(self, key: str, data: Any, expected: str | None) -> str:
            if late == [b"next"]:
                late[:] = [bytes(data), str(expected).encode()]
                raise StoreUnavailableError("no answer")
            if len(late) == 2:
                ghost, tag = late
                late.clear()
                memory.swap(key, ghost, tag.decode())
            return memory.swap(key, data, expected)

    publisher = publish_versions(Delaying(memory), trainer, 2)
    target = arrays_target(zeros_like(trainer.weights))
    subscriber = Subscriber(memory, target)
    subscriber.refit()
    trainer.step()
    late.append(b"next")
    with pytest.raises(StoreUnavailableError):
        publisher.publish(trainer.weights)
    ghost = trainer.copy()
    trainer.step()
    with pytest.raises(StoreConflictError, match="thought lost"):
        publisher.publish(trainer.weights)
    assert subscriber.refit().target.version == 2
    assert same(target.arrays, ghost)
    assert publisher.publish(trainer.weights).stamp.version == 3
    assert subscriber.refit().kinds == ("delta",)
    assert same(target.arrays, trainer.weights)


def test_a_store_that_damages_what_is_put_is_noticed(trainer: Trainer) -> None:
    flip = Fault(damage=lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    times = [0]

    def plan(op: Operation) -> Fault | None:
        if op.kind == "put" and op.key.startswith("objects/") and times[0] < 1:
            times[0] += 1
            return flip
        return None

    store = FaultyStore(MemoryStore(), plan)
    publish_versions(store, trainer, 1)  # put again
    target = arrays_target(zeros_like(trainer.weights))
    Subscriber(store, target).refit()
    assert same(target.arrays, trainer.weights)
    always = FaultyStore(MemoryStore(), lambda op: flip if op.kind == "put" and op.key.startswith("objects/") else None)
    with pytest.raises(CorruptError, match="other bytes than were put"):
        publish_versions(always, trainer, 1)


@pytest.mark.parametrize("prefix", ["objects/", "manifests/", "catalogues/", "HEAD"])
@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "grow", "zeros"])
def test_damaged_bytes_never_reach_the_target(trainer: Trainer, prefix: str, how: str) -> None:
    damage = {
        "flip": lambda d: d[: len(d) // 2] + bytes([d[len(d) // 2] ^ 4]) + d[len(d) // 2 + 1 :],
        "truncate": lambda d: d[: len(d) // 2],
        "empty": lambda d: b"",
        "grow": lambda d: d + b"x",
        "zeros": lambda d: bytes(len(d)),
    }[how]
    memory = MemoryStore()
    publisher = publish_versions(memory, trainer, 1)
    target = arrays_target(trainer.weights)
    broken = [False]
    store = FaultyStore(memory, lambda op: Fault(damage=damage) if broken[0] and op.key.startswith(prefix) else None)
    subscriber = Subscriber(store, target)
    subscriber.refit()
    old = trainer.copy()
    trainer.step()
    publisher.publish(trainer.weights)
    broken[0] = True
    with pytest.raises(RefitError):
        subscriber.refit()
    assert same(target.arrays, old)
    broken[0] = False
    subscriber.refit()
    assert same(target.arrays, trainer.weights)


def test_damage_on_the_way_is_fetched_again(trainer: Trainer) -> None:
    memory = MemoryStore()
    publish_versions(memory, trainer, 2)
    seen: set[str] = set()

    def plan(op: Operation) -> Fault | None:
        if op.kind == "get" and op.key.startswith(("objects/", "manifests/")) and op.key not in seen:
            seen.add(op.key)
            return Fault(damage=lambda d: d[:-1] + bytes([d[-1] ^ 1]))
        return None

    target = arrays_target(zeros_like(trainer.weights))
    Subscriber(FaultyStore(memory, plan), target).refit()
    assert seen
    assert same(target.arrays, trainer.weights)


def test_a_key_is_demanded(trainer: Trainer) -> None:
    store, signer = MemoryStore(), Signer(b"k" * 32)
    publisher = Publisher(store, "run", options=OPTIONS, signer=signer)
    publisher.publish(trainer.weights)
    old = zeros_like(trainer.weights)
    target = arrays_target(old)
    with pytest.raises(RefitError, match="signature is wrong"):
        Subscriber(store, target, signer=Signer(b"x" * 32)).refit()
    assert same(target.arrays, old)
    Subscriber(store, target, signer=signer).refit()
    assert same(target.arrays, trainer.weights)
    unsigned = MemoryStore()
    publish_versions(unsigned, trainer, 1)
    with pytest.raises(RefitError, match="no signature"):
        Subscriber(unsigned, arrays_target(old), signer=signer).refit()
