"""Packed FP4 tensors with their scales and fused siblings: one thing, all or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from halfbyte.refit.arrays import TensorInfo, flat_bytes, infos_of
from halfbyte.refit.codec import TensorDelta, encode
from halfbyte.refit.errors import RefitError
from halfbyte.refit.groups import check_changes, commit_group, find_groups, packed_infos, prepare_group
from halfbyte.refit.manifest import TensorChange

FUSED = [tuple(f"layers.0.{part}_proj" for part in "qkv")]


def checkpoint(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    tensors: dict[str, Any] = {"norm.weight": rng.standard_normal(8).astype(np.float32)}
    for part in "qkvo":
        stem = f"layers.0.{part}_proj"
        tensors[f"{stem}.weight"] = rng.integers(0, 256, (16, 32), dtype=np.uint8)
        tensors[f"{stem}.weight_scale"] = rng.integers(0, 127, (16, 4), dtype=np.uint8)
        tensors[f"{stem}.weight_scale_2"] = np.array(rng.random(), np.float32)
    return tensors


def test_siblings_are_one_group_and_each_name_is_in_one() -> None:
    infos = infos_of(checkpoint(0))
    groups = find_groups(infos, FUSED)
    assert [group.name for group in groups] == ["layers.0.o_proj", "layers.0.q_proj"]
    assert len(groups[1].members) == 9
    assert groups[1].codes == tuple(f"layers.0.{part}_proj.weight" for part in "qkv")
    names = [name for group in groups for name in group.members]
    assert len(names) == len(set(names)) == 12
    packed = packed_infos(infos, groups)
    assert packed["layers.0.k_proj.weight"] == TensorInfo("layers.0.k_proj.weight", "F4", (16, 64))
    assert packed["layers.0.k_proj.weight_scale"].dtype == "U8"
    assert packed_infos(packed, groups) == packed


@pytest.mark.parametrize(
    "names",
    [
        ("a.codes", "a.scales", "a.global_scale"),
        ("a.weight_packed", "a.weight_scale", "a.weight_global_scale"),
        ("a.weight", "a.weight_scale", "a.weight_scale_2"),
        ("a.codes", "a.scales"),
    ],
)
def test_layouts_of_the_libraries(names: tuple[str, ...]) -> None:
    infos = {name: TensorInfo(name, "U8", (4, 4)) for name in names}
    assert [group.members for group in find_groups(infos)] == [names]


def test_an_ordinary_weight_with_a_scale_is_no_group() -> None:
    infos = {
        "a.weight": TensorInfo("a.weight", "F8_E4M3", (4, 4)),
        "a.weight_scale": TensorInfo("a.weight_scale", "F32", ()),
    }
    assert find_groups(infos) == ()


def test_all_or_nothing() -> None:
    old, new = checkpoint(0), checkpoint(1)
    infos = packed_infos(infos_of(old), groups := find_groups(infos_of(old), FUSED))
    group = groups[1]
    deltas = {name: encode(infos[name].dtype, flat_bytes(old[name]), flat_bytes(new[name])) for name in group.members}

    def fresh() -> dict[str, Any]:
        return {name: flat_bytes(old[name]).copy() for name in group.members}

    data = fresh()
    done = commit_group(prepare_group(group, infos, data, deltas), data)
    assert all(data[name].tobytes() == flat_bytes(new[name]).tobytes() for name in group.members)
    assert len(done) == 9

    data = fresh()
    last = sorted(group.members)[-1]
    data[last][0] ^= 1
    with pytest.raises(RefitError, match="none of the group was written"):
        prepare_group(group, infos, data, deltas)

    data = fresh()
    table = deltas[last].table.copy()
    table["target"] ^= 1  # found out when the last member is written
    lying = deltas | {
        last: TensorDelta(infos[last].dtype, deltas[last].elements, deltas[last].block, table, deltas[last].payload)
    }
    with pytest.raises(RefitError, match="back to what they were"):
        commit_group(prepare_group(group, infos, data, lying), data)
    assert all(data[name].tobytes() == flat_bytes(old[name]).tobytes() for name in group.members)

    with pytest.raises(RefitError, match=r"norm\.weight"):
        prepare_group(group, infos, data, {"norm.weight": deltas[last]})


def test_a_version_replaces_a_whole_group_or_patches_it() -> None:
    infos = infos_of(checkpoint(0))
    groups = find_groups(infos, FUSED)
    patch = [TensorChange(infos["layers.0.q_proj.weight"], "patch", 0, 3)]
    check_changes(groups, patch)
    check_changes(groups, [TensorChange(infos[name], "replace", 0) for name in groups[1].members])
    with pytest.raises(RefitError, match=r"layers\.0\.q_proj"):
        check_changes(groups, [TensorChange(infos["layers.0.q_proj.weight"], "replace", 0)])
    with pytest.raises(RefitError, match="group"):
        check_changes(groups, [TensorChange(infos[name], "remove", None) for name in groups[1].members[:-1]])
