"""What is recorded and replayed: which sites of which layers, at how many bits.

The layer policy is text, so that it fits a configuration: ``all``; ``deep:0.5`` and ``first:0.5``, a share of the layers counted
from the last or the first (arXiv 2610.07767 guides the deeper half); ``3,5,7``, a list. ``auto`` is not a policy of its own: it
starts with everything and is narrowed by :func:`halfbyte.guidance.choice.choose`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from halfbyte.errors import ConfigError
from halfbyte.guidance.sites import GROUPS, SITES, Place, places
from halfbyte.models.architecture import Architecture
from halfbyte.models.precision import Precision

__all__ = ["Entry", "Plan", "chosen_layers", "entry_bytes", "make_plan"]


@dataclass(frozen=True, order=True)
class Entry:
    """A site of a layer, and its payload: 1, 2 or 4 bits a number."""

    layer: int
    site: str
    bits: int


@dataclass(frozen=True)
class Plan:
    """Entries in layer order; empty where nothing is guided."""

    entries: tuple[Entry, ...] = ()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def narrowed(self, entries: Iterable[Entry]) -> Plan:
        """A plan of ``entries``, in this plan's order."""
        by_place = {(e.layer, e.site): e for e in entries}
        return Plan(tuple(by_place[e.layer, e.site] for e in self if (e.layer, e.site) in by_place))

    def to_json(self) -> list[list[Any]]:
        """``[[layer, site, bits], ...]``; :meth:`from_json` restores it."""
        return [[e.layer, e.site, e.bits] for e in self]

    @staticmethod
    def from_json(data: Sequence[Sequence[Any]]) -> Plan:
        """The plan that :meth:`to_json` described."""
        return Plan(tuple(Entry(int(layer), str(site), int(bits)) for layer, site, bits in data))

    def formula_bytes(self, arch: Architecture, precision: Precision) -> float:
        """Bytes a token by the formula: sum of n_site * (bits + 8 / block) / 8 (arXiv 2610.07767: b + .5 for NVFP4)."""
        found = {(p.layer, p.site): p for p in places(arch, precision)}
        return sum(entry_bytes(found[e.layer, e.site], e.bits) for e in self if (e.layer, e.site) in found)

    def __str__(self) -> str:
        return json.dumps(self.to_json())


def entry_bytes(place: Place, bits: int) -> float:
    """Bytes a token of one place by the formula: codes and block scales."""
    return place.numbers * (bits + 8 / place.spec.block) / 8


def make_plan(
    arch: Architecture,
    precision: Precision,
    *,
    sites: Sequence[str] = tuple(GROUPS),
    layers: str = "all",
    bits: int = 4,
) -> Plan:
    """The plan of a configuration.

    Arguments:
        sites: names of :data:`GROUPS`, or single sites; sites that ``precision`` does not round are left out.
        layers: a layer policy (see the module).
        bits: 1, 2 or 4.

    Raises:
        ConfigError: an unknown site, policy, layer or number of bits.
    """
    if bits not in (1, 2, 4):
        raise ConfigError(f"{bits} bits a payload", where="alignment.bits", expected="1, 2 or 4")
    unknown = [s for s in sites if s not in GROUPS and s not in SITES]
    if unknown:
        raise ConfigError(
            f"unknown sites: {', '.join(unknown)}", where="alignment.sites", expected=f"some of {', '.join(GROUPS)}"
        )
    wanted = {single for site in sites for single in GROUPS.get(site, (site,))}
    kept = set(chosen_layers(layers, arch.n_layers))
    return Plan(
        tuple(Entry(p.layer, p.site, bits) for p in places(arch, precision) if p.site in wanted and p.layer in kept)
    )


def chosen_layers(policy: str, n_layers: int) -> tuple[int, ...]:
    """The layers a policy names, ascending. A share takes the next whole number of layers: ``deep:0.5`` of 5 is 3.

    Raises:
        ConfigError: a policy that cannot be read, or a layer that the model does not have.
    """
    kind, colon, text = policy.strip().partition(":")
    if not colon and kind in ("all", "auto"):
        return tuple(range(n_layers))
    try:
        if colon and kind in ("deep", "first"):
            share = float(text)
            if 0.0 <= share <= 1.0:
                count = ceil(round(share * n_layers, 9))
                return tuple(range(n_layers - count, n_layers) if kind == "deep" else range(count))
        elif not colon:
            found = tuple(sorted({int(word) for word in kind.split(",")}))
            if found[0] >= 0 and found[-1] < n_layers:
                return found
    except ValueError:
        pass
    raise ConfigError(
        f"the layer policy {policy!r} cannot be used",
        where="alignment.layers",
        expected=f"all, auto, deep:SHARE, first:SHARE, or layers from 0 to {n_layers - 1} with commas",
    )
