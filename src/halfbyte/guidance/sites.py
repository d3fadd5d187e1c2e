"""The places where both executions round, and what a token leaves at each.

A *site* is the input of a quantiser inside a layer. ``linear_in`` is the common name of the inputs of the linears that run in
W4A4 (four a layer in a dense model); routed experts have ``expert_in`` (a row a token, before dispatch) and ``expert_mid`` (a
row for each of the token's experts); ``k`` and ``v`` are what the KV pages hold, a row a head.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.formats import QuantSpec
from halfbyte.models.architecture import Architecture
from halfbyte.models.precision import Precision

__all__ = ["GROUPS", "SITES", "Place", "places", "site_of_linear"]

#: Names of the configuration -> sites.
GROUPS: dict[str, tuple[str, ...]] = {
    "expert_in": ("expert_in",),
    "expert_mid": ("expert_mid",),
    "linear_in": ("qkv_in", "o_in", "mlp_in", "mlp_mid"),
    "k": ("k",),
    "v": ("v",),
}
SITES: tuple[str, ...] = tuple(site for group in GROUPS.values() for site in group)
_LINEARS = {"q_proj": "qkv_in", "o_proj": "o_in", "gate_proj": "mlp_in", "down_proj": "mlp_mid"}


@dataclass(frozen=True)
class Place:
    """A site of a layer: ``rows`` rows of ``width`` numbers a token, rounded by ``spec``."""

    layer: int
    site: str
    rows: int
    width: int
    spec: QuantSpec

    @property
    def numbers(self) -> int:
        """Numbers a token leaves here: n_site of the bytes-per-token formula."""
        return self.rows * self.width


def site_of_linear(name: str) -> str | None:
    """The site that the input of a projection is, by its checkpoint name; None for the router and the head."""
    return _LINEARS.get(name.rpartition(".")[2])


def places(arch: Architecture, precision: Precision) -> tuple[Place, ...]:
    """Every place where a rollout of ``precision`` rounds an activation, a key or a value to FP4, in layer order.

    The head is left out: it sees only the rows whose logits are drawn from, and nothing is rounded after it.
    """
    found = []
    inputs = {
        "qkv_in": arch.hidden_size,
        "o_in": arch.n_heads * arch.head_dim,
        "mlp_in": arch.hidden_size,
        "mlp_mid": arch.intermediate_size,
    }
    act, block = precision.activation_spec, precision.weight_spec.block
    experts_fit = arch.hidden_size % block == 0 and arch.moe_intermediate_size % block == 0
    for layer in range(arch.n_layers):
        routed = arch.is_moe_layer(layer)
        for site, width in inputs.items():
            part = "attention" if site in ("qkv_in", "o_in") else "mlp"
            if (part == "mlp" and routed) or "w4a4" not in precision.kinds(part) or width % block:
                continue
            found.append(Place(layer, site, 1, width, act))
        if routed and experts_fit and "w4a4" in precision.kinds("experts"):
            found.append(Place(layer, "expert_in", 1, arch.hidden_size, act))
            found.append(Place(layer, "expert_mid", arch.experts_per_token, arch.moe_intermediate_size, act))
        if precision.kv == "fp4":
            found += [Place(layer, site, arch.n_kv_heads, arch.head_dim, precision.kv_spec) for site in ("k", "v")]
    return tuple(found)
