"""From the ``alignment`` section to what the engine records and what the learner does with it."""

from __future__ import annotations

from halfbyte.config import AlignmentConfig
from halfbyte.errors import ConfigError, SpecMismatchError
from halfbyte.formats import first_difference
from halfbyte.guidance.batch import Alignment
from halfbyte.guidance.plan import Plan, make_plan
from halfbyte.guidance.rounding import parse_method
from halfbyte.guidance.sites import places
from halfbyte.models.architecture import Architecture
from halfbyte.models.precision import Precision

__all__ = ["is_automatic", "make_alignment"]


def is_automatic(config: AlignmentConfig) -> bool:
    """Whether the first step's measurement decides what is guided."""
    return config.layers.strip() == "auto"


def make_alignment(
    config: AlignmentConfig, arch: Architecture, rollout: Precision, learner: Precision
) -> tuple[Alignment | None, Plan]:
    """The learner's alignment and the rollout's plan; (None, nothing) where no place is rounded to FP4 on both sides.

    Raises:
        ConfigError: an unknown method, site or layer policy, or a method that needs more bits.
        SpecMismatchError: both sides round at a place, but by different rules.
    """
    if config.method == "none":
        return None, Plan()
    method = parse_method(config.method)
    automatic = is_automatic(config)
    if method.name == "hard_replay" and config.bits != 4:
        raise ConfigError(
            f"hard_replay with {config.bits} bits", where="alignment.bits", expected="4: it replays whole codes"
        )
    plan = make_plan(arch, rollout, sites=config.sites, layers=config.layers, bits=4 if automatic else config.bits)
    mine = {(p.layer, p.site): p for p in places(arch, learner)}
    theirs = {(p.layer, p.site): p for p in places(arch, rollout)}
    plan = plan.narrowed(e for e in plan if (e.layer, e.site) in mine)
    for entry in plan:
        difference = first_difference(mine[entry.layer, entry.site].spec, theirs[entry.layer, entry.site].spec)
        if difference is not None:
            raise SpecMismatchError(
                f"rollout and learner round layer {entry.layer} {entry.site} by different rules: {difference}",
                where="learner.precision",
                expected="one QuantSpec on both sides where the rollout guides the learner",
                fix='set learner.precision = "same", or alignment.method = "none"',
            )
    if not plan:
        return None, Plan()
    return (
        Alignment(
            method,
            max_version_lag=config.max_version_lag,
            measured_tokens=max(config.measured_tokens, 256) if automatic else config.measured_tokens,
            thorough=automatic,
        ),
        plan,
    )
