"""The plan of a run: sizes from the model's shapes, seconds from stated or measured rates.

Nothing is loaded and nothing measured here. Sizes follow the code that makes them - packing (``footprint``), guidance rows
(``halfbyte.guidance.layout``), refits (``halfbyte.refit.plan``) - and tests hold them against a real run. Seconds are sizes over
rates that the caller states, or that a run folder has measured; without rates there are none.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from halfbyte.errors import ConfigError
from halfbyte.guidance.layout import Layout
from halfbyte.guidance.plan import make_plan
from halfbyte.learner.memory import activation_bytes_per_token
from halfbyte.models import Architecture, parameter_count, parameter_shapes
from halfbyte.models.precision import PRESETS
from halfbyte.planning.footprint import LEARNER_BYTES, kv_bytes, weight_bytes
from halfbyte.refit.plan import Cost, Scenario
from halfbyte.refit.plan import plan as refit_plan

__all__ = ["Fleet", "PrecisionRow", "RunPlan", "Workload", "plan_run"]


@dataclass(frozen=True)
class Fleet:
    """The machines.

    Arguments:
        workers: engines, each with all weights.
        devices: that an engine is spread over; the learner is spread over ``learner_devices``.
        memory: bytes of one device; None where capacity is not asked.
        reserve: share of a device's memory that is left to everything but weights and KV.
        link: bytes a second of the narrowest link between the learner's store and the workers.
        copies: how often a refit crosses that link (1 with a store on the far side, else the number of engines).
        encode_threads: of the publisher.
    """

    workers: int = 1
    devices: int = 1
    learner_devices: int = 1
    memory: float | None = None
    reserve: float = 0.1
    link: float = 1e9
    copies: int = 1
    encode_threads: int = 1


@dataclass(frozen=True)
class Workload:
    """What a step does.

    Arguments:
        prompts, samples: prompts a step and samples a prompt.
        prompt_tokens, response_tokens: mean lengths.
        context: tokens that a sequence may grow to, for the KV cache.
        precision: preset of the rollout.
        bits, sites, layers: of the guidance (``alignment.*``); no sites: none.
        change_rate: share of BF16 weights that an update changes.
        profile: codec profile of refits.
        rollout_rate: generated tokens a second of one worker; None: unknown.
        learner_rate: generated tokens a second that the whole learner trains on, with their prompts; None: unknown.
    """

    prompts: int = 64
    samples: int = 8
    prompt_tokens: float = 16.0
    response_tokens: float = 16.0
    context: int = 4096
    precision: str = "w4a4kv4"
    bits: int = 1
    sites: tuple[str, ...] = ("expert_in", "expert_mid", "linear_in", "k", "v")
    layers: str = "all"
    change_rate: float = 0.03
    profile: str = "fast"
    rollout_rate: float | None = None
    learner_rate: float | None = None


@dataclass(frozen=True)
class PrecisionRow:
    """One preset.

    Arguments:
        weight_bytes: resident, of one engine.
        kv_bytes_per_token: None where the head holds no whole FP4 blocks.
        kv_tokens: that the engine's memory has room for; None without a memory size. 0: the weights alone do not fit.
        sequences: of the workload's context.
    """

    precision: str
    weight_bytes: int
    kv_bytes_per_token: int | None
    kv_tokens: int | None
    sequences: int | None


@dataclass(frozen=True)
class RunPlan:
    """Sizes in bytes, times in seconds.

    Arguments:
        active_parameters: that a token runs through (all but the experts it is not sent to).
        learner_bytes: FP32 masters, rounded copy, gradients and two moments; activations come on top, a token of a
            micro-batch each ``activation_bytes_per_token``.
        guidance_bytes_per_token: as it lies in memory, and ``guidance_formula``: codes and block scales alone.
        guidance_recorded: what is recorded beyond what KV pages hold anyway.
        rollout_seconds, learner_seconds: None without rates.
        step_seconds: rollout, learner and refit one after the other.
        assumptions: in sentences.
    """

    family: str
    parameters: int
    active_parameters: int
    precisions: tuple[PrecisionRow, ...]
    learner_bytes: int
    learner_bytes_per_device: float
    activation_bytes_per_token: int
    activation_bytes_per_token_checkpointed: int
    tokens: float
    response_tokens: float
    guidance_bytes_per_token: int
    guidance_formula: float
    guidance_recorded: int
    guidance_bytes: float
    refit: Cost
    rollout_seconds: float | None
    learner_seconds: float | None
    step_seconds: float | None
    rollout_share: float | None
    assumptions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """One JSON object."""
        return asdict(self) | {"refit": self.refit.to_json()}


def plan_run(arch: Architecture, fleet: Fleet, work: Workload) -> RunPlan:
    """The plan for a model, machines and a step.

    Raises:
        ConfigError: numbers that no run can have, or an unknown preset, site or layer policy.
    """
    _check(fleet, work)
    count = parameter_count(arch)
    precision = PRESETS[work.precision]
    sequences = work.prompts * work.samples
    tokens = sequences * (work.prompt_tokens + work.response_tokens)
    responses = sequences * work.response_tokens
    guided = make_plan(arch, precision, sites=work.sites, layers=work.layers, bits=work.bits)
    layout = Layout.of(arch, precision, guided)
    refit = refit_plan(
        Scenario(
            parameters=count,
            change_rate=work.change_rate,
            link=fleet.link,
            ranks=fleet.workers * fleet.devices,
            copies=fleet.copies,
            profile="max" if work.profile == "max" else "fast",
            encode_threads=fleet.encode_threads,
            tensors=len(parameter_shapes(arch)),
        )
    )
    rollout = None if work.rollout_rate is None else responses / (work.rollout_rate * fleet.workers)
    learner = None if work.learner_rate is None else responses / work.learner_rate
    step = None if rollout is None or learner is None else rollout + learner + refit.delta_total
    return RunPlan(
        family=arch.family,
        parameters=count,
        active_parameters=_active(arch, count),
        precisions=tuple(_row(arch, name, fleet, work) for name in PRESETS),
        learner_bytes=LEARNER_BYTES * count,
        learner_bytes_per_device=LEARNER_BYTES * count / fleet.learner_devices,
        activation_bytes_per_token=activation_bytes_per_token(arch, checkpointing=False),
        activation_bytes_per_token_checkpointed=activation_bytes_per_token(arch, checkpointing=True),
        tokens=tokens,
        response_tokens=responses,
        guidance_bytes_per_token=layout.row_bytes,
        guidance_formula=guided.formula_bytes(arch, precision),
        guidance_recorded=layout.recorded_bytes,
        # A sample's last token is never fed, so nothing of it is recorded.
        guidance_bytes=layout.row_bytes * (tokens - sequences),
        refit=refit,
        rollout_seconds=rollout,
        learner_seconds=learner,
        step_seconds=step,
        rollout_share=None if step is None or rollout is None else rollout / step,
        assumptions=_assumptions(fleet, work, refit.scenario),
    )


def _row(arch: Architecture, name: str, fleet: Fleet, work: Workload) -> PrecisionRow:
    by_site, _ = weight_bytes(arch, PRESETS[name])
    weights, per_token = sum(by_site.values()), kv_bytes(arch, PRESETS[name])
    if fleet.memory is None or per_token is None:
        return PrecisionRow(name, weights, per_token, None, None)
    room = fleet.memory * fleet.devices * (1 - fleet.reserve) - weights
    held = max(0, math.floor(room / per_token))
    return PrecisionRow(name, weights, per_token, held, held // work.context)


def _active(arch: Architecture, count: int) -> int:
    """Parameters that one token meets."""
    if not arch.n_experts:
        return count
    experts = sum(math.prod(shape) for name, shape in parameter_shapes(arch).items() if ".experts." in name)
    return count - experts + experts * arch.experts_per_token // arch.n_experts


def _check(fleet: Fleet, work: Workload) -> None:
    for group in (fleet, work):
        for field in fields(group):
            value = getattr(group, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            least_zero = field.name in ("reserve", "change_rate", "prompt_tokens")
            if not math.isfinite(value) or value < 0 or (value == 0 and not least_zero):
                raise ConfigError(f"{field.name} is {value}", where=field.name, expected="a positive number")
    if fleet.reserve >= 1:
        raise ConfigError(f"reserve is {fleet.reserve}", where="reserve", expected="a share below 1")
    if work.precision not in PRESETS:
        raise ConfigError(
            f"unknown precision {work.precision!r}", where="precision", expected=f"one of {', '.join(PRESETS)}"
        )
    if work.profile not in ("fast", "max"):
        raise ConfigError(f"unknown profile {work.profile!r}", where="profile", expected="fast or max")


def _assumptions(fleet: Fleet, work: Workload, refit: Scenario) -> tuple[str, ...]:
    found = [
        f"every worker holds all weights, spread evenly over its {fleet.devices} device(s), with {fleet.reserve:.0%} of their "
        "memory left to all but weights and KV",
        "memory of weights and KV as this engine packs them; another engine pads and pools otherwise",
        f"learner: {LEARNER_BYTES} bytes a parameter (FP32 master, rounded copy, gradient, two moments), spread evenly over "
        f"{fleet.learner_devices} device(s); activations on top, per token of a micro-batch",
        f"guidance of every token but a sample's last: {work.bits} bit(s), layers {work.layers}; an upper figure, the learner "
        "takes only samples with an advantage",
        f"{work.change_rate:.1%} of the BF16 weights change in an update; bytes by the fit of halfbyte.refit.plan",
        f"refit: {fleet.copies} crossing(s) of a link of {fleet.link / 1e6:,.0f} MB/s, {refit.encode_threads} encoding "
        f"thread(s) at {refit.encode_rate / 1e9:g} GB/s, ranks applying at {refit.apply_rate / 1e9:g} GB/s",
        "rollout, learner and refit one after the other; an asynchronous run hides part of them",
    ]
    if work.rollout_rate is None or work.learner_rate is None:
        found.append(
            "no rates were stated, so no seconds of rollout and learner: --run FOLDER or --rollout-rate, --learner-rate"
        )
    else:
        found.append(
            f"{work.rollout_rate:,.0f} tokens/s generated by a worker and {work.learner_rate:,.0f} trained on, at any batch; "
            f"{fleet.workers} worker(s) scale linearly"
        )
    return tuple(found)
