"""The guidance of a learner's flat batch: the rows of its trajectories, cut by layer and site when a layer asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from halfbyte.errors import ConfigError, DataError
from halfbyte.formats import Payload
from halfbyte.guidance.layout import Field, Layout, decode_global
from halfbyte.guidance.plan import Plan
from halfbyte.guidance.rounding import TRACE, RoundingMethod
from halfbyte.kernels import Kernels
from halfbyte.models.trajectory import GuidanceRows

__all__ = ["Alignment", "BatchGuidance", "Guide", "gather", "read_layout", "too_old"]


@dataclass(frozen=True)
class Alignment:
    """How a learner uses guidance.

    Arguments:
        method: the rounding; None only compares codes and rounds as without guidance.
        plan: the places to guide and their bits; None takes what was recorded.
        max_version_lag: guidance of a weight version older than the learner's by more than this is not used.
        measured_tokens: tokens a step whose own codes are compared with the rollout's.
        thorough: also measure what payloads of fewer bits than recorded would repair.
    """

    method: RoundingMethod | None = TRACE
    plan: Plan | None = None
    max_version_lag: int = 0
    measured_tokens: int = 64
    thorough: bool = False


@dataclass(frozen=True, eq=False)
class Guide:
    """The guidance of one site: a payload of the activation's shape, and which rows of it hold anything.

    Arguments:
        payload: [R, ..., K].
        guided: [R, ...] bool without the last dimension, or its leading part.
    """

    layer: int
    site: str
    payload: Payload
    guided: Tensor

    def select(self, rows: Tensor) -> Guide:
        """The entries ``rows`` [N] int64 of the first dimension."""
        return Guide(self.layer, self.site, self.payload.select(rows), self.guided.index_select(0, rows))

    def flat(self) -> Guide:
        """[T, k, K] as [T * k, K]."""
        p = self.payload
        t, k, width = p.shape
        g = p.global_scale if p.global_scale.dim() == 0 else p.global_scale.reshape(t * k)
        flat = Payload(p.codes.view(t * k, -1), p.scales.view(t * k, -1), g, p.spec, p.bits, (t * k, width))
        return Guide(self.layer, self.site, flat, self.guided.reshape(-1))


@dataclass(frozen=True, eq=False)
class BatchGuidance:
    """Rows of ``T`` flat tokens.

    Arguments:
        rows: [T, recorded_bytes] uint8. kv: [T, row_bytes - recorded_bytes] uint8.
        have: [T] bool, tokens with a row.
        routes: [T, moe layers, k] int64, the experts that the rollout's slots went to; None for dense models.
        moe_index: layer -> its place in ``routes``.
        bits: (layer, site) -> bits to guide with, of the places that are guided.
        wanted: tokens that could have a row (all but padding and the last of each sequence).
    """

    layout: Layout
    rows: Tensor
    kv: Tensor
    have: Tensor
    routes: Tensor | None
    moe_index: dict[int, int]
    bits: dict[tuple[int, str], int]
    kernels: Kernels
    wanted: int

    def to(self, device: torch.device) -> BatchGuidance:
        """On another device."""
        routes = None if self.routes is None else self.routes.to(device)
        return replace(self, rows=self.rows.to(device), kv=self.kv.to(device), have=self.have.to(device), routes=routes)

    def at(self, layer: int, site: str, chosen: Tensor | None = None) -> Guide | None:
        """The guide of a site, None where it is not guided.

        Arguments:
            chosen: [T, k] int64, for ``expert_mid``: the experts of this pass where they need not be the rollout's. A row whose
                expert the rollout did not run for the token has no guidance; others follow their expert to its slot.
        """
        bits = self.bits.get((layer, site))
        if bits is None:
            return None
        found = self._read(self.layout.by_place[layer, site], bits)
        if chosen is None or self.routes is None:
            return found
        recorded = self.routes[:, self.moe_index[layer]]
        same = chosen[:, :, None] == recorded[:, None, :]
        slots = same.int().argmax(dim=2)
        k = recorded.shape[1]
        moved = found.flat().select((torch.arange(len(slots), device=slots.device)[:, None] * k + slots).view(-1))
        return Guide(layer, site, _unflat(moved.payload, k), (moved.guided.view(-1, k) & same.any(dim=2)))

    def _read(self, f: Field, bits: int) -> Guide:
        place, count = f.place, len(self.rows)
        shape = (count, place.width) if place.site not in ("expert_mid", "k", "v") else (count, place.rows, place.width)
        own = self.layout.recorded_bytes
        source, shift = (self.kv, own) if place.site in ("k", "v") else (self.rows, 0)
        codes, scales, stored = (
            source[:, a - shift : b - shift].contiguous()
            for a, b in ((f.start, f.scales_at), (f.scales_at, f.global_at), (f.global_at, f.stop))
        )
        guided = self.have
        if f.global_bytes:
            g = decode_global(stored.view(count * place.rows, -1), place.spec).view(shape[:-1])
            guided = (g != 0) & (self.have if g.dim() == 1 else self.have[:, None])
            if place.spec.global_scale != "token":
                g = torch.tensor(place.spec.constant if place.spec.global_scale == "constant" else 1.0)
        else:
            g = torch.tensor(place.spec.constant if place.spec.global_scale == "constant" else 1.0)
        payload = Payload(codes.view(*shape[:-1], -1), scales.view(*shape[:-1], -1), g, place.spec, f.bits, shape)
        if bits != f.bits:
            payload = self.kernels.payload(payload.quantised(), bits)  # type: ignore[arg-type]
        return Guide(place.layer, place.site, payload, guided)

    @property
    def unguided(self) -> int:
        """Tokens that have no row although they could."""
        return self.wanted - int(self.have.sum())


def _unflat(p: Payload, k: int) -> Payload:
    t = p.shape[0] // k
    g = p.global_scale if p.global_scale.dim() == 0 else p.global_scale.view(t, k)
    return Payload(p.codes.view(t, k, -1), p.scales.view(t, k, -1), g, p.spec, p.bits, (t, k, p.shape[1]))


@lru_cache(maxsize=8)
def read_layout(text: str) -> Layout:
    """The layout that travels with rows, parsed once a text.

    Raises:
        DataError: not a layout.
    """
    return Layout.from_text(text)


def too_old(record: GuidanceRows, alignment: Alignment, version: int) -> bool:
    """Whether a learner of ``version`` leaves a record unused for its age."""
    return version - record.version > alignment.max_version_lag


def gather(
    records: Sequence[GuidanceRows | None],
    lengths: Sequence[int],
    widths: Sequence[int],
    routes: Tensor | None,
    moe_layers: Sequence[int],
    alignment: Alignment,
    version: int,
    kernels: Kernels,
) -> BatchGuidance | None:
    """Guidance of a batch whose sequences take ``widths`` rows each, ``lengths`` of them tokens; None where nobody has any.

    Arguments:
        records: what each trajectory brought; None, and records older than the alignment allows, leave its tokens unguided.
        routes: [T, moe layers, k] int64, the rollout's.
        version: the learner's weight version.

    Raises:
        DataError: records of different plans in one batch, or rows that do not fit their layout.
        ConfigError: more bits wanted than recorded.
    """
    used = [None if r is None or too_old(r, alignment, version) else r for r in records]
    layouts = {r.layout for r in used if r is not None}
    if not layouts:
        return None
    if len(layouts) > 1:
        raise DataError("one batch holds guidance of different plans", expected="one plan for all samples of a step")
    layout = read_layout(next(iter(layouts)))
    total = sum(widths)
    own = layout.recorded_bytes
    rows, kv = (np.empty((total, width), dtype=np.uint8) for width in (own, layout.row_bytes - own))
    have = np.zeros(total, dtype=bool)
    start = 0
    for record, width in zip(used, widths):
        if record is not None:
            count = len(record)
            if (record.rows.shape[1:], record.kv.shape[1:]) != (rows.shape[1:], kv.shape[1:]):
                raise DataError(
                    f"guidance has {record.rows.shape[1:]} and {record.kv.shape[1:]} bytes a token",
                    expected=f"{rows.shape[1:]} and {kv.shape[1:]}, as its layout says",
                )
            rows[start : start + count] = record.rows
            kv[start : start + count] = record.kv
            have[start : start + count] = True
        start += width
    return BatchGuidance(
        layout,
        torch.from_numpy(rows),
        torch.from_numpy(kv),
        torch.from_numpy(have),
        routes,
        {layer: i for i, layer in enumerate(moe_layers)},
        _wanted_bits(layout, alignment.plan),
        kernels,
        wanted=sum(n - 1 for n in lengths),
    )


def _wanted_bits(layout: Layout, plan: Plan | None) -> dict[tuple[int, str], int]:
    recorded: dict[tuple[int, str], int] = {place: f.bits for place, f in layout.by_place.items()}
    if plan is None:
        return recorded
    out = {}
    for entry in plan:
        have = recorded.get((entry.layer, entry.site))
        if have is None:
            continue
        if entry.bits != have and have != 4:
            raise ConfigError(
                f"layer {entry.layer} {entry.site} was recorded at {have} bits and cannot be read at {entry.bits}",
                where="alignment.bits",
                expected="the bits that the rollout recorded, or a recording of 4",
            )
        out[entry.layer, entry.site] = entry.bits
    return out
