"""The model as a refit target: which tensors are loaded together, and the way back."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import RefitError
from halfbyte.refit.adapters.arrays import ArraysTarget
from halfbyte.refit.errors import TargetError
from halfbyte.refit.store import FilesystemStore
from halfbyte.refit.subscriber import Subscriber
from halfbyte.rollout.vllm.errors import VllmError
from halfbyte.rollout.vllm.handshake import Handshake
from halfbyte.rollout.vllm.target import Exactly, ModelTarget, whole_groups

NAMES = [
    "model.embed_tokens.weight",
    "model.layers.0.mlp.experts.0.up_proj.weight",
    "model.layers.0.mlp.experts.1.up_proj.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.10.self_attn.q_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]


def test_a_change_brings_its_whole_layer() -> None:
    assert whole_groups([NAMES[2]], NAMES) == NAMES[1:4], "all experts, and what else the layer fuses"
    assert whole_groups([NAMES[4]], NAMES) == [NAMES[4]], "layer 1 is not layer 10"
    assert whole_groups(["lm_head.weight"], NAMES) == [NAMES[0], *NAMES[6:]]
    assert whole_groups(["model.layers.1.gone"], NAMES) == [NAMES[4]], "a removed tensor too"
    assert whole_groups([], NAMES) == []


@given(st.sets(st.sampled_from(NAMES)))
def test_groups_hold_every_change_and_stay_in_order(changed: set[str]) -> None:
    got = whole_groups(changed, NAMES)
    assert changed <= set(got)
    assert got == [name for name in NAMES if name in got]
    assert whole_groups(got, NAMES) == got


class Model:
    """Remembers what it was given."""

    def __init__(self, host: dict[str, torch.Tensor]) -> None:
        self.host, self.failures = host, 0
        self.served = {name: t.clone() for name, t in host.items()}
        self.loads: list[set[str]] = []

    def load(self, changed: Collection[str]) -> None:
        self.loads.append(set(changed))
        for name in whole_groups(changed, self.host):
            self.served[name] = self.host[name].clone()
            if self.failures:
                self.failures -= 1
                raise OSError("injected")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_an_update_loads_what_changed_and_a_failure_loads_it_back(training: Any) -> None:
    host = {name: t.clone() for name, t in training.weights.items()}
    model = Model(host)
    subscriber = Subscriber(FilesystemStore(training.store), ModelTarget(ArraysTarget(host), model))
    subscriber.refit()
    old = {name: t.clone() for name, t in training.weights.items()}
    training.publish("model.layers.0.mlp.gate.weight")
    model.failures = 1
    with pytest.raises(TargetError, match="serves its old version again"):
        subscriber.refit()
    assert same(model.served, old)
    assert same(host, old)
    model.loads.clear()
    subscriber.refit()
    assert same(model.served, training.weights)
    assert model.loads == [{"model.layers.0.mlp.gate.weight"}]


def test_exactly_goes_nowhere_else(training: Any) -> None:
    head = training.publisher.head
    assert Exactly(1, head.state).goal(None, head) is not None
    assert Exactly(1, head.state).goal(head.stamp, head) is None, "there already"
    for version, state in ((2, head.state), (0, head.state), (1, "0" * 64)):
        with pytest.raises(RefitError, match="HEAD is version 1"):
            Exactly(version, state).goal(None, head)


def test_a_handshake_is_read_back_and_checked() -> None:
    hand = Handshake(1, "0.32.0", "bfloat16", None, "cpu", False, "halfbyte", "run", 3, "ab", 0)
    assert Handshake.from_json(hand.to_json(), "there") == hand
    for wrong in (
        None,
        [],
        {},
        hand.to_json() | {"dtype": 5},
        hand.to_json() | {"version": "3"},
        hand.to_json() | {"rank": True},
    ):
        with pytest.raises(VllmError):
            Handshake.from_json(wrong, "there")
