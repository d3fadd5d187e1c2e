"""Groups: tensors that are one thing. Packed FP4 codes mean nothing without the scales and global scale they were made with,
and fused siblings (q, k and v; gate and up) share a global scale: they change together or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import Bytes, TensorInfo
from halfbyte.refit.codec import Applied, Prepared, TensorDelta, commit, prepare, revert
from halfbyte.refit.manifest import TensorChange

__all__ = ["LAYOUTS", "Group", "check_changes", "commit_group", "find_groups", "packed_infos", "prepare_group"]


@dataclass(frozen=True)
class Layout:
    """Suffixes that a library gives to the parts of a packed weight: codes first, then its scales."""

    codes: str
    scales: tuple[str, ...]


#: Known layouts: ours, ModelOpt's, compressed-tensors'. Codes are U8, two a byte, the low half first.
LAYOUTS: Mapping[str, Layout] = {
    "halfbyte": Layout(".codes", (".scales", ".global_scale")),
    "modelopt": Layout(".weight", (".weight_scale", ".weight_scale_2")),
    "compressed-tensors": Layout(".weight_packed", (".weight_scale", ".weight_global_scale")),
}


@dataclass(frozen=True)
class Group:
    """Tensors that change together. ``codes``: those of the members whose bytes are 4-bit codes."""

    name: str
    members: tuple[str, ...]
    codes: tuple[str, ...]


def find_groups(infos: Mapping[str, TensorInfo], fused: Iterable[Sequence[str]] = ()) -> tuple[Group, ...]:
    """Packed FP4 tensors of a checkpoint, by the names and dtypes of a known layout.

    Arguments:
        infos: all tensors.
        fused: stems that share a global scale, such as (``...q_proj``, ``...k_proj``, ``...v_proj``); stems that are not
            there are passed over.
    Returns:
        groups in order of their first name; a name is in one group at most.
    """
    stems: dict[str, list[str]] = {}
    codes: dict[str, str] = {}
    for name, info in infos.items():
        for layout in LAYOUTS.values():
            stem = name.removesuffix(layout.codes)
            parts = [stem + suffix for suffix in layout.scales if stem + suffix in infos]
            if stem != name and info.dtype in ("U8", "F4") and parts:
                stems[stem], codes[stem] = [name, *parts], name
                break
    taken: set[str] = set()
    groups = []
    for together in (*map(tuple, fused), *((stem,) for stem in stems)):
        here = [stem for stem in together if stem in stems and stem not in taken]
        if here:
            taken.update(here)
            members = tuple(name for stem in here for name in stems[stem])
            groups.append(Group(here[0], members, tuple(codes[stem] for stem in here)))
    return tuple(sorted(groups, key=lambda group: group.name))


def packed_infos(infos: Mapping[str, TensorInfo], groups: Iterable[Group]) -> dict[str, TensorInfo]:
    """The infos with codes seen as what they are: dtype F4 and twice the last size, so that the codec counts codes.

    Raises:
        RefitError: codes of a dtype other than U8 or F4, or 0-d.
    """
    result = dict(infos)
    for name in (name for group in groups for name in group.codes):
        info = infos[name]
        if info.dtype == "F4":
            continue
        if info.dtype != "U8" or not info.shape:
            raise RefitError(
                f"tensor {name!r} holds no packed codes",
                where=f"{info.dtype} {list(info.shape)}",
                expected="U8 [..., K/2]",
            )
        result[name] = replace(info, dtype="F4", shape=(*info.shape[:-1], 2 * info.shape[-1]))
    return result


def check_changes(groups: Iterable[Group], changes: Iterable[TensorChange]) -> None:
    """A version may patch any members of a group, but add, remove or replace only all of them.

    Raises:
        RefitError: a group of which only some members come, go or change shape.
    """
    whole = {change.info.name: change.operation for change in changes if change.operation != "patch"}
    for group in groups:
        found = {whole.get(name) for name in group.members}
        if len(found) > 1:
            there = next(name for name in group.members if name in whole)
            missing = next(name for name in group.members if whole.get(name) != whole[there])
            raise RefitError(
                f"a version that does {whole[there]} {there!r} and not {missing!r}",
                where=f"group {group.name!r}",
                expected="codes, scales and global scales of a tensor and its fused siblings in one version",
            )


def prepare_group(
    group: Group, infos: Mapping[str, TensorInfo], data: Mapping[str, Bytes], deltas: Mapping[str, TensorDelta]
) -> dict[str, Prepared]:
    """Prepare the members that change. Nothing is written.

    Raises:
        RefitError: a delta for a name outside the group, a damaged stream, or a block of any member that is neither base nor
            target: then no member may be written.
    """
    if strangers := sorted(deltas.keys() - set(group.members)):
        raise RefitError(f"a delta for {strangers[0]!r}", where=f"group {group.name!r}")
    ready = {name: prepare(infos[name].dtype, data[name], deltas[name], where=name) for name in sorted(deltas)}
    for name, prepared in ready.items():
        if prepared.damaged:
            raise RefitError(
                f"tensor {name!r} is neither the base nor the target in blocks {list(prepared.damaged[:5])}",
                where=f"group {group.name!r}",
                fix="repair these blocks; none of the group was written",
            )
    return ready


def commit_group(ready: Mapping[str, Prepared], data: Mapping[str, Bytes]) -> dict[str, Applied]:
    """Write all members, or none: if one fails, those before it are brought back.

    Raises:
        RefitError: see ``codec.commit``.
    """
    done: dict[str, Applied] = {}
    try:
        for name, prepared in ready.items():
            done[name] = commit(prepared, data[name])
    except Exception:
        for name, applied in _backwards(done):
            revert(data[name], applied.undo)
        raise
    return done


def _backwards(done: Mapping[str, Applied]) -> Iterator[tuple[str, Applied]]:
    return reversed(list(done.items()))
