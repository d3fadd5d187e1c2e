"""Plans: layer policies, sites of a precision, the formula's bytes, the layout of a row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.bench.random_moe import moe_architecture
from halfbyte.errors import ConfigError, DataError, SpecMismatchError
from halfbyte.formats import get_spec, quantise
from halfbyte.guidance.layout import Layout, decode_global, global_source
from halfbyte.guidance.plan import Plan, chosen_layers, make_plan
from halfbyte.guidance.sites import places
from halfbyte.kernels import get
from halfbyte.models.precision import precision_from

ARCH = moe_architecture(n_layers=5, mlp_only_layers=(1,))
EXPERTS = precision_from("experts-w4a4kv4")


@pytest.mark.parametrize(
    ("policy", "layers"),
    [
        ("all", (0, 1, 2, 3, 4)),
        ("auto", (0, 1, 2, 3, 4)),
        ("deep:0.5", (2, 3, 4)),
        ("deep:0.4", (3, 4)),
        ("first:0.2", (0,)),
        ("first:0", ()),
        ("deep:1", (0, 1, 2, 3, 4)),
        ("3,1", (1, 3)),
        (" 2 ", (2,)),
    ],
)
def test_layer_policies(policy: str, layers: tuple[int, ...]) -> None:
    assert chosen_layers(policy, 5) == layers


@pytest.mark.parametrize(
    "policy", ["", "deep", "deep:1.1", "deep:x", "first:-1", "5", "-1", "1;2", "half:0.5", "deep:nan"]
)
def test_unreadable_policies_are_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match="layer policy"):
        chosen_layers(policy, 5)


def test_the_paper_s_setting_costs_what_its_formula_says() -> None:
    """Expert input and KV, 1 bit, deeper half: sum of n * (b + .5) / 8 over the guided layers (arXiv 2610.07767)."""
    plan = make_plan(ARCH, EXPERTS, sites=("expert_in", "k", "v"), layers="deep:0.5", bits=1)
    assert plan.formula_bytes(ARCH, EXPERTS) == 3 * (1024 + 2 * 4 * 64) * 1.5 / 8


def test_sites_are_those_that_the_precision_rounds() -> None:
    kinds = {name: {(p.layer, p.site) for p in places(ARCH, precision_from(name))} for name in ("bf16", "w4a4kv4")}
    assert kinds["bf16"] == set()
    assert {s for layer, s in kinds["w4a4kv4"] if layer == 1} == {"qkv_in", "o_in", "mlp_in", "mlp_mid", "k", "v"}
    assert {s for layer, s in kinds["w4a4kv4"] if layer == 2} == {"qkv_in", "o_in", "expert_in", "expert_mid", "k", "v"}
    assert {p.site for p in places(ARCH, EXPERTS)} == {"expert_in", "expert_mid", "k", "v"}
    odd = moe_architecture(moe_intermediate_size=100)  # the rollout falls back to BF16 for these experts
    assert {p.site for p in places(odd, EXPERTS)} == {"k", "v"}


def test_unknown_sites_and_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match="expert_out"):
        make_plan(ARCH, EXPERTS, sites=("expert_out",))
    with pytest.raises(ConfigError, match="3 bits"):
        make_plan(ARCH, EXPERTS, bits=3)


def test_plans_and_layouts_round_trip() -> None:
    plan = make_plan(ARCH, precision_from("w4a4kv4"), bits=2)
    assert Plan.from_json(plan.to_json()) == plan
    layout = Layout.of(ARCH, precision_from("w4a4kv4"), plan)
    assert Layout.from_text(layout.to_text()) == layout
    assert layout.row_bytes == layout.fields[-1].stop
    assert [f.start for f in layout.fields[1:]] == [f.stop for f in layout.fields[:-1]]
    kv = [f.place.site in ("k", "v") for f in layout.fields]
    assert kv == sorted(kv)
    assert layout.recorded_bytes == layout.fields[kv.index(True)].start


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"specs": [], "entries": [[0, "k", 1, 16, 0, 4]]}', '{"specs": 1, "entries": 2}']
)
def test_a_damaged_layout_is_refused(text: str) -> None:
    with pytest.raises(DataError):
        Layout.from_text(text)


def test_places_of_another_rule_are_refused_by_field() -> None:
    layout = Layout.of(ARCH, EXPERTS, make_plan(ARCH, EXPERTS))
    layout.require_places(places(ARCH, EXPERTS), "here")
    other = precision_from({"preset": "experts-w4a4kv4", "kv_spec": "halfbyte_kv"})
    layout.require_places(places(ARCH, other), "here")
    changed = replace(EXPERTS, kv_spec=get_spec("halfbyte_kv").replace(constant=0.25))
    with pytest.raises(SpecMismatchError, match="constant"):
        layout.require_places(places(ARCH, changed), "here")


@given(st.lists(st.floats(2.0**-100, 2.0**100), min_size=1, max_size=40), st.booleans())
def test_global_scales_round_trip(values: list[float], power_of_two: bool) -> None:
    spec = get_spec("halfbyte_token").replace(global_rounding="power_of_two" if power_of_two else "none")
    x = torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 16).contiguous()
    g = quantise(x, spec).global_scale
    stored = torch.zeros(len(values), 1 if power_of_two else 4, dtype=torch.uint8)
    slots = torch.arange(len(values)).flip(0)
    get("reference").store_parts(stored, slots, [(global_source(g, spec, len(values), 1), 0)])
    assert torch.equal(decode_global(stored, spec).flip(0), g)
    assert float(decode_global(torch.zeros_like(stored), spec).abs().max()) == 0.0
