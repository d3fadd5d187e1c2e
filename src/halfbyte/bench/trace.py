"""``halfbyte bench trace``: what each way of guiding leaves of the gap between rollout and learner, on a real model.

The rollout runs once and records whole codes everywhere. Every row is one training step of a learner with rate 0 on those
responses, under another method, payload, set of sites or layers: nothing but the learner's rounding differs between rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfbyte.bench.random_moe import RandomTensors, moe_architecture
from halfbyte.config import LearnerConfig, ObjectiveConfig
from halfbyte.envs import make_env
from halfbyte.errors import ConfigError, SpecMismatchError
from halfbyte.formats import get_spec
from halfbyte.guidance.batch import Alignment, read_layout
from halfbyte.guidance.plan import Plan, make_plan
from halfbyte.guidance.rounding import HARD_REPLAY, SCALE_ONLY, TRACE, RoundingMethod
from halfbyte.guidance.sites import places
from halfbyte.kernels import active
from halfbyte.learner.learner import Learner
from halfbyte.models.architecture import Architecture
from halfbyte.models.open_model import open_model
from halfbyte.models.precision import Kind, Precision, precision_from
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request

__all__ = ["Run", "TraceRow", "Trial", "compare", "full_runs", "open_trial", "random_trial", "short_runs"]


@dataclass(frozen=True)
class TraceRow:
    """One step.

    Arguments:
        method: ``none`` (the learner's own rounding, same spec), ``none, other spec``, ``asymmetric`` (no rounding of activations
            and KV), ``shuffled`` (a control: guidance of other samples), or a rounding method.
        code_mismatch: share of the learner's own codes, at the sites of the row, that are not the rollout's. What guidance
            repairs at one site lowers it at the next.
        bytes_per_token: codes and block scales, by the formula.
        step_seconds: processor time of the step.
        share_k3, share_gap: k3_kl and mean_abs_gap over those of ``none``.
    """

    model: str
    precision: str
    products: str
    method: str
    payload_bits: int
    sites: str
    layers: str
    router_replay: bool
    k3_kl: float
    mean_abs_gap: float
    max_abs_gap: float
    code_mismatch: float
    bytes_per_token: float
    step_seconds: float
    share_k3: float = 1.0
    share_gap: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """One flat JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class Run:
    """What a row does. ``method`` None: no guidance, but codes are compared."""

    label: str
    method: RoundingMethod | None
    sites: tuple[str, ...] = ()
    bits: int = 4
    layers: str = "all"
    replay: bool = True
    shuffled: bool = False
    learner: str = ""


@dataclass(frozen=True)
class Trial:
    """A model, what its rollout said, and everything that it recorded."""

    model: str
    arch: Architecture
    tensors: Mapping[str, Tensor]
    precision: Precision
    trajectories: Sequence[Trajectory]


_IN, _KV, _MID, _LINEAR = ("expert_in",), ("k", "v"), ("expert_mid",), ("linear_in",)


def open_trial(model: str, precision: str, *, env: str, prompts: int, samples: int, tokens: int) -> Trial:
    """Sample ``samples`` responses of ``tokens`` tokens to prompts of ``env``.

    Raises:
        UserError: the model, precision or environment cannot be used.
    """
    checkpoint, tokenizer = open_model(model)
    environment = make_env(env)
    texts = [environment.prompt("eval", i) for i in range(prompts)]
    ids = [
        tuple(tokenizer.encode_chat(p.messages) if p.messages is not None else tokenizer.encode(p.text or ""))
        for p in texts
    ]
    return _sampled(model, checkpoint.architecture, dict(checkpoint.tensors), precision, ids, samples, tokens)


def random_trial(precision: str, *, layers: int, prompts: int, samples: int, tokens: int) -> Trial:
    """The same for a mixture of experts with random weights: d 256, ``layers`` layers, 4 of 16 experts of 128."""
    arch = moe_architecture(
        vocab_size=1024, hidden_size=256, intermediate_size=256, n_layers=layers, n_heads=8, n_kv_heads=2, head_dim=32,
        n_experts=16, experts_per_token=4, moe_intermediate_size=128, max_positions=512,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    ids = [tuple(row) for row in torch.randint(1, 1024, (prompts, 16), generator=generator).tolist()]
    return _sampled(f"random-moe-{layers}", arch, dict(RandomTensors(arch)), precision, ids, samples, tokens)


def _sampled(
    model: str,
    arch: Architecture,
    tensors: Mapping[str, Tensor],
    precision: str,
    prompts: Sequence[tuple[int, ...]],
    samples: int,
    tokens: int,
) -> Trial:
    settled = precision_from(precision)
    plan = make_plan(arch, settled)
    if not plan:
        raise ConfigError(
            f"{precision} rounds no activation", where="--precision", expected="w4a4kv4 or experts-w4a4kv4, say"
        )
    longest = max(map(len, prompts)) + tokens
    options = EngineOptions(max_length=longest, kv_memory_mb=1024)
    engine = Engine(arch, settled, tensors, options=options, guidance=plan)
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    out = engine.generate([Request(p, sampling, n=samples, key=i, group=i) for i, p in enumerate(prompts)])
    for i, t in enumerate(out):
        t.reward = float(i % 2)
    return Trial(model, arch, tensors, settled, out)


def short_runs(trial: Trial) -> list[Run]:
    """Baselines, controls, and one thing changed at a time."""
    everything = _sites(trial)
    experts = bool(trial.arch.n_experts)
    main = (_IN if experts else _LINEAR) + _KV
    sets = [main, everything]
    if experts:
        sets = [_IN, _KV, main, _IN + _MID + _KV, everything]
    runs = _baselines(everything)
    runs += [Run("trace", TRACE, sites) for sites in dict.fromkeys(sets)]
    runs += [Run("trace", TRACE, main, bits) for bits in (2, 1)]
    runs += [Run("trace", TRACE, main, 1, layers) for layers in ("deep:0.5", "first:0.5", "deep:0.25")]
    runs += [Run("trace", TRACE, everything, 4, layers) for layers in ("deep:0.5", "first:0.5")]
    runs += [Run(str(m), m, everything) for m in (SCALE_ONLY, RoundingMethod("shift", 0.5), HARD_REPLAY)]
    if experts:
        runs += [Run("none", None, everything, replay=False), Run("trace", TRACE, everything, replay=False)]
    return [*runs, Run("shuffled", TRACE, everything, shuffled=True)]


def full_runs(trial: Trial) -> list[Run]:
    """Every method with every payload, set of sites and layer policy."""
    everything = _sites(trial)
    sets = dict.fromkeys(
        [_IN, _KV, _IN + _KV, _IN + _MID + _KV, everything] if trial.arch.n_experts else [_KV, everything]
    )
    runs = _baselines(everything)
    for method in (TRACE, SCALE_ONLY, RoundingMethod("shift", 0.5), HARD_REPLAY):
        for bits in (4,) if method in (SCALE_ONLY, HARD_REPLAY) else (4, 2, 1):
            for sites in sets:
                for layers in ("all", "deep:0.5", "first:0.5", "deep:0.25"):
                    runs.append(Run(str(method), method, sites, bits, layers))
    return [*runs, Run("shuffled", TRACE, everything, shuffled=True)]


def _baselines(everything: tuple[str, ...]) -> list[Run]:
    return [
        Run("none", None, everything),
        Run("none, other spec", None, (), learner="other"),
        Run("asymmetric", None, (), learner="w4a16"),
    ]


def _sites(trial: Trial) -> tuple[str, ...]:
    have = {e.site for e in make_plan(trial.arch, trial.precision)}
    groups = [*_IN, *_MID, *(_LINEAR if have - {"expert_in", "expert_mid", "k", "v"} else ()), *_KV]
    return tuple(g for g in groups if g in have or g == "linear_in")


def compare(trial: Trial, runs: Sequence[Run], products: str, *, repeats: int = 1) -> Iterator[TraceRow]:
    """A row for each run, in order; the first has to be ``none``.

    Arguments:
        products: of the learner, ``bf16`` or ``fp32``.
        repeats: steps a row; the fastest counts.

    Raises:
        SpecMismatchError: never for these rows; guidance of another spec is tried and has to be refused first.
    """
    _refuses_another_spec(trial)
    base: TraceRow | None = None
    learners: dict[tuple[str, bool], Learner] = {}  # at rate 0 a step leaves no trace
    for run in runs:
        key = run.learner, run.replay
        if key not in learners:
            learners[key] = _learner(trial, run, products, None)
        row = _row(trial, run, learners[key], repeats)
        base = base or row
        yield replace(
            row,
            share_k3=row.k3_kl / base.k3_kl if base.k3_kl else 0.0,
            share_gap=row.mean_abs_gap / base.mean_abs_gap if base.mean_abs_gap else 0.0,
        )


def _row(trial: Trial, run: Run, learner: Learner, repeats: int) -> TraceRow:
    plan = make_plan(trial.arch, trial.precision, sites=run.sites, layers=run.layers, bits=run.bits)
    trajectories = list(trial.trajectories)
    if run.shuffled:
        trajectories = _shuffled(trajectories)
    seconds = []
    metrics: dict[str, float] = {}
    learner.alignment = None if run.learner else Alignment(run.method, plan, measured_tokens=128)
    for _ in range(repeats):
        start = time.process_time()
        metrics = learner.step(trajectories, 0).metrics
        seconds.append(time.process_time() - start)
    guided = plan if run.method is not None else Plan()
    return TraceRow(
        trial.model,
        trial.precision.name,
        learner.config.products,
        run.label,
        run.bits if guided else 0,
        "+".join(run.sites) if guided else "",
        run.layers if guided else "",
        run.replay,
        metrics["gap/k3_kl"],
        metrics["gap/mean_abs"],
        metrics["gap/max_abs"],
        metrics.get("align/code_mismatch", float("nan")),
        guided.formula_bytes(trial.arch, trial.precision),
        min(seconds),
    )


def _shuffled(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Every token gets the guidance of some other token."""
    held = [t.guidance for t in trajectories if t.guidance is not None]
    order = np.random.default_rng(0).permutation(sum(map(len, held)))
    ends = np.cumsum([len(g) for g in held])[:-1]
    rows, kv = (np.split(np.concatenate([getattr(g, part) for g in held])[order], ends) for part in ("rows", "kv"))
    return [replace(t, guidance=replace(g, rows=r, kv=k)) for t, g, r, k in zip(trajectories, held, rows, kv)]


def _learner(trial: Trial, run: Run, products: str, alignment: Alignment | None) -> Learner:
    return Learner(
        trial.arch,
        trial.tensors,
        precision=_precision(trial, run.learner),
        rollout_precision=trial.precision,
        config=LearnerConfig(lr=0.0, schedule="constant", products=products, router_replay=run.replay),  # type: ignore[arg-type]
        objective_config=ObjectiveConfig(skip_zero_advantage=False),
        kernels=active(),
        total_steps=1,
        alignment=alignment,
    )


def _precision(trial: Trial, learner: str) -> Precision:
    precision = trial.precision
    if learner == "other":  # ModelOpt's rule for activations, with a global scale a token
        return replace(precision, activation_spec=get_spec("modelopt").replace(global_scale="token"))
    if learner == "w4a16":
        d = precision.decode
        attention, mlp, experts = (_weights_only(kind) for kind in (d.attention, d.mlp, d.experts))
        plain = replace(d, attention=attention, mlp=mlp, experts=experts)
        return replace(precision, prefill=plain, decode=plain, kv="bf16")
    return precision


def _weights_only(kind: Kind) -> Kind:
    return "w4a16" if kind == "w4a4" else kind


def _refuses_another_spec(trial: Trial) -> None:
    other = places(trial.arch, _precision(trial, "other"))
    recorded = trial.trajectories[0].guidance
    assert recorded is not None
    try:
        read_layout(recorded.layout).require_places(other, where="bench trace")
    except SpecMismatchError:
        return
    assert all(p.site in ("k", "v") for p in other), "guidance of another spec was accepted"
