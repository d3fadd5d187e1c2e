"""Which weights of a model become codes, which of them share a global scale, and which stay as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from halfbyte.errors import ConfigError
from halfbyte.formats import QuantSpec, QuantTensor, fits, split_columns
from halfbyte.models.architecture import Architecture, Site, expert_names, parameter_shapes, site_of
from halfbyte.models.fp4 import Style

__all__ = ["KINDS", "Kind", "Plan", "make_plan", "require_split"]

Kind = Literal["w4a4", "w4a16", "experts-only"]
#: Precision of ``halfbyte quantize`` -> (sites that become codes, whether their inputs are quantised as well).
KINDS: dict[Kind, tuple[tuple[Site, ...], bool]] = {
    "w4a4": (("attention", "mlp", "experts"), True),
    "w4a16": (("attention", "mlp", "experts"), False),
    "experts-only": (("experts",), True),
}


@dataclass(frozen=True)
class Plan:
    """The weights by checkpoint name.

    Attributes:
        groups: weights to quantise, together with those that share their global scale, in the order of the forward pass.
        left: modules of matrices that stay as they are, for the ``ignore`` list of a config.
        misfits: those of ``left`` that would be quantised if their shape had whole blocks (torchao #3233).
    """

    groups: tuple[tuple[str, ...], ...]
    left: tuple[str, ...]
    misfits: tuple[str, ...]

    @property
    def coded(self) -> tuple[str, ...]:
        """Every weight to quantise."""
        return tuple(name for group in self.groups for name in group)


def make_plan(arch: Architecture, kind: Kind, spec: QuantSpec, style: Style) -> Plan:
    """Sort the weights. Embedding, head, routers and norms always stay; so do both matrices of an expert where one does not fit.

    Gate and up of an expert share a global scale, as in the engine. Where the style's readers fuse them, so do q, k and v, and
    gate and up of a dense MLP.

    Raises:
        ConfigError: ``experts-only`` for a model without experts, or nothing that could be quantised.
    """
    sites, _ = KINDS[kind]
    if kind == "experts-only" and not arch.n_experts:
        raise ConfigError(
            f"{arch.family} has no experts", where="--precision experts-only", expected="a mixture of experts",
            fix="use w4a4 or w4a16",
        )  # fmt: skip
    shapes = {name: shape for name, shape in parameter_shapes(arch).items() if len(shape) == 2}
    experts_fit = all(fits((16, width), spec) for width in (arch.hidden_size, arch.moe_intermediate_size) if width)
    groups: list[tuple[str, ...]] = []
    left: list[str] = []
    misfits: list[str] = []
    for group in _candidates(arch, fused=style.fused):
        site = site_of(group[0])
        fitting = all(fits(shapes[name], spec) for name in group) and (site != "experts" or experts_fit)
        if site in sites and fitting:
            groups.append(group)
        else:
            left += group
            misfits += group if site in sites else ()
    taken = {name for group in groups for name in group} | set(left)
    left += [name for name in shapes if name not in taken and site_of(name) != "embed"]
    if arch.tie_embeddings:
        left.append("lm_head.weight")  # no tensor of the files, but a module of the readers
    if not groups:
        raise ConfigError(
            f"no weight of this model can be quantised by spec {spec.name!r}",
            where=f"{len(misfits)} matrices without whole blocks of {spec.block}",
            expected=f"inputs divisible by {spec.block}",
        )
    return Plan(tuple(groups), _modules(left), _modules(misfits))


def require_split(plan: Plan, arch: Architecture, spec: QuantSpec, ranks: int) -> None:
    """Refuse a tensor-parallel split that would cut a block (vLLM #49949). Output and down projections split their inputs.

    Raises:
        ShapeError: the sizes are in the message.
        ConfigError: not a number of ranks.
    """
    if ranks < 1:
        raise ConfigError(f"--tensor-parallel is {ranks}", where="command line", expected="at least 1 rank")
    shapes = parameter_shapes(arch)
    for name in plan.coded:
        if name.endswith((".o_proj.weight", ".down_proj.weight", ".w2.weight")):
            n, k = shapes[name]
            codes = torch.empty(n, k // 2, dtype=torch.uint8, device="meta")
            scales = torch.empty(n, k // spec.block, dtype=torch.uint8, device="meta")
            split_columns(QuantTensor(codes, scales, torch.ones(()), spec, (n, k)), ranks, name=name)


def _candidates(arch: Architecture, *, fused: bool) -> list[tuple[str, ...]]:
    groups: list[tuple[str, ...]] = []
    for layer in range(arch.n_layers):
        attn, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        qkv = tuple(f"{attn}.{part}_proj.weight" for part in "qkv")
        groups += [qkv] if fused else [(name,) for name in qkv]
        groups.append((f"{attn}.o_proj.weight",))
        if arch.is_moe_layer(layer):
            for expert in range(arch.n_experts):
                gate, up, down = expert_names(arch, layer, expert)
                groups += [(gate, up), (down,)]
        else:
            gate, up, down = (f"{mlp}.{part}_proj.weight" for part in ("gate", "up", "down"))
            groups += [(gate, up)] if fused else [(gate,), (up,)]
            groups.append((down,))
    return groups


def _modules(names: list[str]) -> tuple[str, ...]:
    return tuple(name.removesuffix(".weight") for name in names)
