"""The in-process engine as the target of a refit in FP4 coordinates.

Codes, block scales and global scales are patched as they are packed: nothing is quantised, and no BF16 copy of an FP4 weight
exists on this side. The publisher quantises (:func:`fp4_coordinates`), with the rule that the engine would have used.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from halfbyte.formats import QuantTensor, multiplier_pair, shared_global, validate
from halfbyte.kernels import Kernels
from halfbyte.models.architecture import Architecture, expert_names, parameter_shapes, site_of
from halfbyte.models.layout import ParameterLayout
from halfbyte.models.precision import Precision
from halfbyte.refit.arrays import Bytes, TensorInfo, flat_bytes, infos_of, writable_bytes
from halfbyte.refit.errors import LayoutError
from halfbyte.refit.patch import Stamp, Update, write_block
from halfbyte.rollout.engine import Engine
from halfbyte.rollout.packer import Source
from halfbyte.rollout.refit_target import Staged, checked_info, ready
from halfbyte.rollout.weights import RolloutWeights, published

__all__ = ["Fp4EngineTarget", "fp4_coordinates", "fp4_infos"]

_SCALE = ".global_scale"


class Fp4EngineTarget:
    """Codes, scales and global scales as the engine packs them, patched directly.

    Arguments:
        engine: made from ``tensors``; every site's kind is one FP4 kind or one dense kind in both phases.
        tensors: as :func:`fp4_coordinates` gives them; they are copied.

    Raises:
        LayoutError: a phase needs the BF16 weight of an FP4 site as well, so that codes alone cannot serve it.
    """

    survives = False

    def __init__(self, engine: Engine, tensors: Mapping[str, Tensor], *, stamp: Stamp | None = None) -> None:
        self.engine, self._stamp = engine, stamp
        _refuse_mixed_phases(engine.precision)
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self._infos = fp4_infos(self.tensors)
        self._staged: Staged | None = None
        self._after: dict[str, Tensor] = {}
        source = _source_of(engine.arch, engine.precision, self.tensors)
        weights = RolloutWeights.from_source(
            engine.arch, engine.precision, source, engine.kernels, engine.version, engine.max_length
        )
        engine.swap(weights)

    def infos(self) -> Mapping[str, TensorInfo]:
        """Names, dtypes and shapes; codes are F4 with two to a byte."""
        return self._infos

    def stamp(self) -> Stamp | None:
        """What the engine serves."""
        return self._stamp

    def read(self, name: str) -> Bytes:
        """A tensor's bytes."""
        return flat_bytes(self.tensors[name])

    def stage(self, update: Update) -> None:
        """Patch copies of what changes, check that a quantiser can have written them, and pack the matrices they are part of.

        Raises:
            LayoutError: tensors are added, removed or re-shaped.
            NumericsError: a scale is NaN or negative, or a weight is not finite.
        """
        after = dict(self.tensors)
        touched: set[str] = set()
        for change in update.changes:
            info = checked_info(change, self._infos)
            after[info.name] = after[info.name].clone()
            data = writable_bytes(after[info.name])
            for block in change.blocks:
                write_block(data, block, "new", expect=("old",))
            touched.add(_weight_of(info.name))
        arch, precision = self.engine.arch, self.engine.precision
        source = _source_of(arch, precision, after, check=touched)
        layout = ParameterLayout(arch)
        everything = torch.ones(1, dtype=torch.bool)
        rows = {}
        for name in touched:
            dense = layout.locations[name].parameter
            rows[name if name in source.codes else dense] = everything
        for name in rows:
            if name in source.params:
                rows[name] = torch.ones(source.params[name].shape[:-1].numel(), dtype=torch.bool)
        weights, count = self.engine.weights.repacked(source, rows, self.engine.kernels, version=update.target.version)
        self._after = after
        self._staged = Staged(weights, self.engine.weights, source, source, count)

    def pause(self) -> None:
        """See :meth:`EngineTarget.pause`."""

    def commit(self, update: Update) -> None:
        """Swap one reference."""
        staged = ready(self._staged)
        self.engine.swap(staged.after)
        self.tensors, self._after, self._stamp = self._after, self.tensors, update.target

    def rollback(self, update: Update) -> None:
        """Swap it back."""
        staged = ready(self._staged)
        if self.engine.weights is not staged.before:
            self.engine.swap(staged.before)
        if self._stamp == update.target:
            self.tensors, self._after = self._after, self.tensors
        self._stamp = update.source

    def resume(self) -> None:
        """See :meth:`EngineTarget.resume`."""

    def discard(self, update: Update) -> None:
        """Drop the version that is not served."""
        self._staged, self._after = None, {}


def fp4_coordinates(
    arch: Architecture, precision: Precision, tensors: Mapping[str, Tensor], kernels: Kernels
) -> dict[str, Tensor]:
    """Published tensors with every FP4 weight as ``<name>.codes``, ``<name>.scales`` and ``<name>.global_scale``.

    Arguments:
        tensors: checkpoint names; ``<name>.global_scale`` where scales outlive versions.
    Raises:
        LayoutError: see :class:`Fp4EngineTarget`.
    """
    _refuse_mixed_phases(precision)
    source = published(arch, precision, tensors)
    views = dict(ParameterLayout(arch).checkpoint_views(source.params))
    fused = _shared_scales(arch, precision, views, source.scales)
    out: dict[str, Tensor] = {}
    for name, tensor in views.items():
        if not _is_coded(arch, precision, name):
            out[name] = tensor.contiguous()
            continue
        q = kernels.quantise(tensor.contiguous(), precision.weight_spec, global_scale=fused.get(name), name=name)
        out |= {f"{name}.codes": q.codes, f"{name}.scales": q.scales, f"{name}{_SCALE}": q.global_scale}
    return out


def fp4_infos(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """Dtypes and shapes in FP4 coordinates: codes are F4, their shape counts codes; block scales are F8_E4M3."""
    out = infos_of(tensors)
    for name, info in list(out.items()):
        if name.endswith(".codes"):
            out[name] = TensorInfo(name, "F4", (*info.shape[:-1], 2 * info.shape[-1]))
        elif name.endswith(".scales"):
            out[name] = TensorInfo(name, "F8_E4M3", info.shape)
    return out


def _refuse_mixed_phases(precision: Precision) -> None:
    for site in ("attention", "mlp", "experts", "head"):
        kinds = precision.kinds(site)
        coded = [kind in ("w4a4", "w4a16") for kind in kinds]
        if any(coded) and not all(coded):
            raise LayoutError(
                f"site {site!r} runs in {' and '.join(kinds)}",
                where=f"precision {precision.name}",
                expected="FP4 in both phases, so that codes are all it needs",
                fix="refit in BF16 coordinates",
            )


def _is_coded(arch: Architecture, precision: Precision, name: str) -> bool:
    """Whether the engine packs this checkpoint tensor as codes and needs no other form of it."""
    site = site_of(name)
    shape = parameter_shapes(arch)[name]
    if len(shape) < 2 or site in ("embed", "norm", "router"):
        return False
    if precision.kinds(site)[0] not in ("w4a4", "w4a16"):
        return False
    widths = [arch.hidden_size, arch.moe_intermediate_size] if site == "experts" else [shape[-1]]
    return all(width % precision.weight_spec.block == 0 for width in widths)


def _shared_scales(
    arch: Architecture, precision: Precision, views: Mapping[str, Tensor], kept: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Global scales that are given rather than derived from one tensor: kept ones, and those of gate and up of an expert."""

    spec = precision.weight_spec
    out = dict(kept)
    if spec.global_scale != "tensor":
        return out
    for layer in arch.moe_layers:
        for e in range(arch.n_experts):
            gate, up, _ = expert_names(arch, layer, e)
            if gate in out:
                out[up] = out[gate]
            elif _is_coded(arch, precision, gate):
                shared = shared_global([views[gate], views[up]], spec)
                if float(shared) > 0:
                    out[gate] = out[up] = shared
    return out


def _weight_of(name: str) -> str:
    for part in (".codes", ".scales", _SCALE):
        if name.endswith(part):
            return name.removesuffix(part)
    return name


def _source_of(
    arch: Architecture, precision: Precision, tensors: Mapping[str, Tensor], *, check: set[str] | None = None
) -> Source:
    """The packer's source in FP4 coordinates. ``check``: weights whose codes are validated; None: all."""
    spec, layout = precision.weight_spec, ParameterLayout(arch)
    params: dict[str, Tensor] = {}
    codes: dict[str, QuantTensor] = {}
    dtype = torch.float32 if precision.exact else torch.bfloat16
    for name, shape in parameter_shapes(arch).items():
        if f"{name}.codes" in tensors:
            packed, scales, stored = (tensors[f"{name}.{part}"] for part in ("codes", "scales", "global_scale"))
            q = QuantTensor(packed, scales, stored, spec, shape)
            if check is None or name in check:
                validate(q, name)
            g = multiplier_pair(q.global_scale, spec)[0]
            rows = g.expand(shape[0]).contiguous() if g.ndim == 0 else g
            codes[name] = QuantTensor(q.codes, q.scales, rows, spec.replace(global_convention="multiplier"), shape)
            continue
        if name not in tensors:
            raise LayoutError("a tensor is missing", where=name, expected="codes and scales, or the dense weight")
        where = layout.locations[name]
        if where.expert is None:
            params[where.parameter] = tensors[name].to(dtype)
        else:
            held = params.setdefault(where.parameter, torch.empty(layout.shapes[where.parameter], dtype=dtype))
            where.of(held).copy_(tensors[name])
    return Source(params, {}, codes)
