"""QuantSpec: equality, JSON, refusal of what does not exist."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch

from halfbyte.errors import ConfigError
from halfbyte.formats import SPECS, QuantSpec, first_difference, get_spec, quantise

NAMES = {
    "halfbyte", "halfbyte_token", "halfbyte_kv", "halfbyte_2d",
    "halfbyte_frozen", "halfbyte_hysteretic", "torchao", "modelopt", "compressed_tensors",
    "fouroversix_static6", "fouroversix_mse", "mx_floor", "mx_even", "mx_rceil", "mx_modelopt", "mx_naive",
}  # fmt: skip


def test_names() -> None:
    assert set(SPECS) == NAMES
    assert all(spec.name == name for name, spec in SPECS.items())
    with pytest.raises(ConfigError, match="torchao"):
        get_spec("tochao")


def test_named_specs_are_different_choices() -> None:
    for a, b in itertools.combinations(SPECS.values(), 2):
        difference = first_difference(a, b)
        assert a != b
        assert difference is not None
        field = difference.split(":")[0]
        assert getattr(a, field) != getattr(b, field)


def test_a_name_is_not_a_choice() -> None:
    renamed = get_spec("halfbyte").replace(name="mine")
    assert renamed == get_spec("halfbyte")
    assert hash(renamed) == hash(get_spec("halfbyte"))
    assert first_difference(renamed, get_spec("halfbyte")) is None


def test_first_difference_names_the_field_and_both_values() -> None:
    a = get_spec("halfbyte")
    assert first_difference(a, a.replace(ties="away")) == "ties: 'even' != 'away'"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_json_round_trip(name: str) -> None:
    spec = get_spec(name)
    restored = QuantSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert restored == spec
    assert restored.name == name


def test_json_is_never_guessed() -> None:
    record = get_spec("halfbyte").to_json()
    with pytest.raises(ConfigError, match="unknown \\['flavour'\\]"):
        QuantSpec.from_json({**record, "flavour": "plain"})
    del record["ties"]
    with pytest.raises(ConfigError, match="missing \\['ties'\\]"):
        QuantSpec.from_json(record)


@pytest.mark.parametrize(
    "change",
    [
        {"ties": "up"}, {"format": "fp4"}, {"constant": 0.0}, {"constant": float("nan")}, {"scale_floor": -1.0},
        {"scale_max": 512.0}, {"zero_global": 2.0}, {"scale_rows": 8}, {"format": "mxfp4"},
        {"global_scale": "token", "scale_rows": 16},
    ],
)  # fmt: skip
def test_impossible_choices_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(
        ConfigError, match=next(iter(change)) if len(change) == 1 and "format" not in change else "QuantSpec"
    ):
        get_spec("halfbyte").replace(**change)


def test_every_choice_changes_some_bits() -> None:
    """A field that no quantiser reads would be decoration: each alternative must change a result on some input."""
    generator = torch.Generator().manual_seed(1)
    ladder = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0, -0.0, -0.01, 0.01, 1.0, 2.0, 3.0, 4.0])
    rows = torch.cat([torch.randn(48, 64, generator=generator), ladder.repeat(16, 4)])
    scales = torch.exp2(torch.randint(-28, 3, (64, 4), generator=generator).float()).repeat_interleave(16, dim=-1)
    inputs = [rows, rows * scales, (rows * scales).bfloat16(), torch.zeros(16, 64)]
    inputs += [torch.randn(16, 64, generator=generator) for _ in range(32)]
    inputs += [torch.randn(64, 64, generator=generator).bfloat16() for _ in range(32)]  # coarse enough for exact ties
    nv = get_spec("halfbyte").replace(global_rounding="none")
    reciprocal = nv.replace(global_convention="reciprocal")
    wrap_base = nv.replace(element_scale="reciprocal_product")
    mx = get_spec("mx_floor")
    changes: list[tuple[QuantSpec, dict[str, Any]]] = [
        (mx, {"format": "nvfp4"}),
        *((nv, {"global_scale": mode}) for mode in ("token", "constant", "none")),
        (nv.replace(global_scale="constant"), {"constant": 0.125}),
        (nv, {"global_rounding": "power_of_two"}),
        *((nv, {"global_convention": convention}) for convention in ("reciprocal", "amax")),
        (nv, {"global_division": "reciprocal"}),
        (nv, {"zero_global": 0.0}),
        (nv, {"arithmetic": "input"}),
        (nv.replace(arithmetic="input"), {"amax_division": "reciprocal"}),
        *((nv, {"block_scale": order}) for order in ("divide_product", "multiply_inverse")),
        (nv, {"scale_floor": 2.0**-6}),
        (nv, {"zero_scale": 0.125}),
        (nv, {"scale_max": 256.0}),
        *((nv, {"element_scale": order}) for order in ("reciprocal_global", "reciprocal_product")),
        (reciprocal, {"element_scale": "divide_ratio"}),
        *((nv, {"ties": rule}) for rule in ("toward_zero", "away")),
        *((nv, {"zero_sign": rule}) for rule in ("keep", "negative", "nonpositive")),
        (wrap_base, {"overflow": "wrap"}),
        (nv, {"four_over_six": "mse"}),
        *((mx, {"mx_scale": rule}) for rule in ("even", "rceil", "modelopt", "naive")),
        (nv, {"scale_rows": 16}),
    ]
    covered = {next(iter(change)) for _, change in changes}
    # global_update concerns a series of versions: test_stable_scale.py shows what it changes
    assert covered == {f.name for f in dataclasses.fields(QuantSpec)} - {"name", "global_update"}
    for spec, change in changes:
        alternative = spec.replace(**change)
        pairs = ((quantise(x, spec), quantise(x, alternative)) for x in inputs)
        assert any(
            a.global_scale.shape != b.global_scale.shape
            or a.scales.shape != b.scales.shape
            or not all(torch.equal(getattr(a, part), getattr(b, part)) for part in ("codes", "scales", "global_scale"))
            for a, b in pairs
        ), change
