"""Which part of the model runs in which precision, in prefill and in decode.

A *site* is a group of matrix products (attention projections, dense MLP, routed experts, head, router). A :class:`Precision`
gives every site a kind for prompt tokens (``prefill``) and for generated tokens (``decode``), a kind for the KV cache, and
the three ``QuantSpec`` in use. It travels with trajectories; a learner refuses a rollout whose precision it was not told of
(:func:`require_same`). The phase belongs to the token's role, not to the schedule, so that a preempted and recomputed
sequence keeps its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from halfbyte.errors import ConfigError, SpecMismatchError
from halfbyte.formats import QuantSpec, first_difference, get_spec

__all__ = ["PRESETS", "Kind", "KvKind", "Precision", "Sites", "precision_from", "require_same", "with_weight_spec"]

Kind = Literal["fp32", "bf16", "w4a16", "w4a4"]
KvKind = Literal["fp32", "bf16", "fp4"]


@dataclass(frozen=True)
class Sites:
    """The kind of every site. The router stays FP32: its logits decide discrete routes."""

    attention: Kind
    mlp: Kind
    experts: Kind
    head: Kind
    router: Kind = "fp32"

    @classmethod
    def all(cls, kind: Kind, *, head: Kind | None = None) -> Sites:
        """Every matrix product in ``kind``; the head in ``head`` (default: BF16, or FP32 when all is FP32)."""
        return cls(kind, kind, kind, head or ("fp32" if kind == "fp32" else "bf16"))


@dataclass(frozen=True)
class Precision:
    """Kinds by phase and site, the KV cache's kind, and the quantisation specs."""

    name: str
    prefill: Sites
    decode: Sites
    kv: KvKind
    weight_spec: QuantSpec
    activation_spec: QuantSpec
    kv_spec: QuantSpec

    @property
    def phased(self) -> bool:
        """True when prompt and generated tokens differ in precision at some site."""
        return self.prefill != self.decode

    @property
    def exact(self) -> bool:
        """True when some product (the router aside) runs in FP32: weights are then published as FP32 masters, not as BF16."""
        kinds = (getattr(s, f.name) for s in (self.prefill, self.decode) for f in fields(Sites) if f.name != "router")
        return "fp32" in kinds

    def kinds(self, site: str) -> tuple[Kind, ...]:
        """The distinct kinds ``site`` needs weights for, prefill first."""
        pair: tuple[Kind, Kind] = (getattr(self.prefill, site), getattr(self.decode, site))
        return pair[:1] if pair[0] == pair[1] else pair

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every choice; :meth:`from_json` restores an equal object."""
        out: dict[str, Any] = {"name": self.name, "kv": self.kv}
        for phase in ("prefill", "decode"):
            out[phase] = {f.name: getattr(getattr(self, phase), f.name) for f in fields(Sites)}
        for key in ("weight_spec", "activation_spec", "kv_spec"):
            out[key] = getattr(self, key).to_json()
        return out

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Precision:
        """The precision that :meth:`to_json` described."""
        return cls(
            name=data["name"],
            prefill=Sites(**data["prefill"]),
            decode=Sites(**data["decode"]),
            kv=data["kv"],
            weight_spec=QuantSpec.from_json(data["weight_spec"]),
            activation_spec=QuantSpec.from_json(data["activation_spec"]),
            kv_spec=QuantSpec.from_json(data["kv_spec"]),
        )


def _preset(name: str, sites: Sites, kv: KvKind) -> Precision:
    return Precision(name, sites, sites, kv, get_spec("halfbyte"), get_spec("halfbyte_token"), get_spec("halfbyte_kv"))


PRESETS: dict[str, Precision] = {
    p.name: p
    for p in (
        _preset("fp32", Sites.all("fp32"), "fp32"),
        _preset("bf16", Sites.all("bf16"), "bf16"),
        _preset("w4a4kv4", Sites.all("w4a4"), "fp4"),
        _preset("w4a4kv4-head", Sites.all("w4a4", head="w4a4"), "fp4"),
        _preset("experts-w4a4kv4", Sites("bf16", "bf16", "w4a4", "bf16"), "fp4"),
        _preset("w4a16", Sites.all("w4a16"), "bf16"),
    )
}


def precision_from(value: str | dict[str, Any] | Precision) -> Precision:
    """A preset by name, or ``{"preset": name, "kv": ..., "prefill": {site: kind}, "decode": {...}, "weight_spec": name}``.

    Raises:
        ConfigError: unknown preset, site, kind, KV kind or spec, naming the known ones.
    """
    if isinstance(value, Precision):
        return value
    if isinstance(value, str):
        if value not in PRESETS:
            raise ConfigError(
                f"unknown precision {value!r}", where="precision", expected=f"one of {', '.join(PRESETS)}"
            )
        return PRESETS[value]
    settings = dict(value)
    base = precision_from(str(settings.pop("preset", "bf16")))
    changes: dict[str, Any] = {}
    for phase in ("prefill", "decode"):
        sites = settings.pop(phase, {})
        if not isinstance(sites, dict):
            raise ConfigError(
                f"precision.{phase} must be a table", where=f"precision.{phase}", expected="site = kind pairs"
            )
        known = {f.name for f in fields(Sites)}
        for site, kind in sites.items():
            if site not in known or kind not in get_args(Kind):
                raise ConfigError(
                    f"unknown site or kind: {site} = {kind!r}",
                    where=f"precision.{phase}",
                    expected=f"site in {sorted(known)}, kind in {list(get_args(Kind))}",
                )
        changes[phase] = replace(getattr(base, phase), **sites)
    if "kv" in settings:
        changes["kv"] = settings.pop("kv")
        if changes["kv"] not in get_args(KvKind):
            raise ConfigError(
                f"unknown KV kind {changes['kv']!r}", where="precision.kv", expected=str(get_args(KvKind))
            )
    for key in ("weight_spec", "activation_spec", "kv_spec"):
        if key in settings:
            changes[key] = get_spec(settings.pop(key))
    if settings:
        raise ConfigError(
            f"unknown precision keys: {', '.join(map(str, settings))}",
            where="precision",
            expected="preset, prefill, decode, kv, weight_spec, activation_spec, kv_spec",
        )
    out = replace(base, **changes)
    for label, spec in (("activation_spec", out.activation_spec), ("kv_spec", out.kv_spec)):
        if spec.global_scale == "tensor":
            raise ConfigError(
                f"{label} takes its global scale from the whole batch",
                where=f"precision.{label}",
                expected="a per-token or constant global scale: a sample must not depend on its neighbours",
                fix="use halfbyte_token for activations and halfbyte_kv for the KV cache",
            )
    return out if out == base else replace(out, name=f"{base.name}*")


def with_weight_spec(precision: Precision, spec: QuantSpec) -> Precision:
    """``precision`` for weights that are codes by ``spec`` already; inputs of W4A4 products follow to its block format."""
    activations = precision.activation_spec
    if activations.format != spec.format:
        activations = get_spec("mx_floor" if spec.format == "mxfp4" else "halfbyte_token")
    out = replace(precision, weight_spec=spec, activation_spec=activations)
    return precision if out == precision else replace(out, name=f"{precision.name.removesuffix('*')}*")


def require_same(expected: Precision, got: Precision, *, where: str) -> None:
    """Refuse ``got`` unless it equals ``expected`` in everything but its name.

    Raises:
        SpecMismatchError: naming the first field that differs and both values.
    """
    for key in ("weight_spec", "activation_spec", "kv_spec"):
        difference = first_difference(getattr(expected, key), getattr(got, key))
        if difference is not None:
            raise SpecMismatchError(
                f"{key} differs: {difference}",
                where=where,
                expected="the rollout and the learner use one QuantSpec",
                fix="set the same precision on both sides, or regenerate the rollouts",
            )
    for field in fields(Precision):
        a, b = getattr(expected, field.name), getattr(got, field.name)
        if field.name != "name" and a != b:
            raise SpecMismatchError(
                f"precision field {field.name} differs: {a} here, {b} in the rollout",
                where=where,
                expected="the precision the learner was told of",
                fix="set learner.precision and precision to match, or regenerate the rollouts",
            )
