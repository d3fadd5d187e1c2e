"""One training step: trajectories and rewards in, updated masters and metrics out.

The objective (``halfbyte.objective``) is pure functions; this file only runs the forward and backward passes they need,
in micro-batches whose size changes nothing but memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from halfbyte import objective
from halfbyte.config import LearnerConfig, ObjectiveConfig
from halfbyte.errors import ConfigError, SpecMismatchError
from halfbyte.guidance.batch import Alignment, read_layout, too_old
from halfbyte.guidance.measure import Comparison, Observer
from halfbyte.guidance.rounding import TRACE
from halfbyte.guidance.sites import places
from halfbyte.kernels import Kernels
from halfbyte.learner.autograd import AutogradExecution
from halfbyte.learner.batch import LearnerBatch, collate
from halfbyte.learner.decisions import Decisions
from halfbyte.learner.diagnosis import Monitor, Tokens, rows_of_samples
from halfbyte.learner.division import Pass, passes
from halfbyte.learner.join import first_found, joined_statistics
from halfbyte.learner.memory import tokens_that_fit
from halfbyte.learner.native import NativeExecution, PackedModel
from halfbyte.learner.optimiser import Optimiser
from halfbyte.learner.parameters import Parameters
from halfbyte.learner.ranks import Alone, Ranks
from halfbyte.learner.schedule import rate_factor
from halfbyte.models.architecture import Architecture
from halfbyte.models.decoder import hidden_states
from halfbyte.models.logprob import positive_temperature, token_logprobs
from halfbyte.models.precision import Precision, require_same
from halfbyte.models.trajectory import Trajectory

__all__ = ["Learner", "Scored", "StepResult"]


@dataclass(frozen=True, eq=False)
class Scored:
    """The learner's view of a batch: flat over response tokens, in order of trajectory. ``logp`` [R] float32."""

    logp: Tensor
    rollout_logp: Tensor
    mask: Tensor
    sequence: Tensor
    versions: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class StepResult:
    """Metrics of a step, and whether any weight changed (a step without learning signal changes none, TRL #5937)."""

    metrics: dict[str, float]
    changed: bool
    warnings: tuple[str, ...] = field(default=())
    decisions: Decisions | None = None


class Learner:
    """Master weights, optimiser, and the training step.

    Arguments:
        tensors: a checkpoint's tensors.
        precision: what the learner's own forward pass runs in.
        rollout_precision: what rollouts must say they ran in; anything else is refused by name of the field.
        total_steps: length of the schedule.
        alignment: how the rollout's guidance is used; None for the learner's own rounding.
        correction: in place of the one that ``objective_config`` names.
        pack: published tensors by checkpoint name -> packed weights, for ``execution = "native"``.
        delimiters: [V] bool, token ids that end a line or sentence, see ``objective.delimiter_flags``; for the segmenter
            ``delimiter``.
        ranks: the processes that train together; each makes the same calls with the same trajectories.
        make_parameters: in place of ``Parameters``: sharded ones, of several ranks.
        device: where forward and backward passes run; off the CPU with kernels that can (``kernels.registry.for_device``).

    Attributes:
        comparisons: (layer, site) -> how far the last step's own rounding was from the rollout's.
    """

    def __init__(
        self,
        arch: Architecture,
        tensors: Mapping[str, Tensor],
        *,
        precision: Precision,
        rollout_precision: Precision,
        config: LearnerConfig,
        objective_config: ObjectiveConfig,
        kernels: Kernels,
        total_steps: int,
        seed: int = 0,
        max_response_tokens: int | None = None,
        n_positions: int | None = None,
        reference: Mapping[str, Tensor] | None = None,
        alignment: Alignment | None = None,
        correction: objective.Correction | None = None,
        delimiters: Tensor | None = None,
        pack: Callable[[Mapping[str, Tensor]], PackedModel] | None = None,
        ranks: Ranks | None = None,
        make_parameters: Callable[..., Parameters] = Parameters,
        device: torch.device | None = None,
    ) -> None:
        self.ranks, self.device = ranks or Alone(), device or torch.device("cpu")
        if config.execution == "native":
            require_same(rollout_precision, precision, where="learner.precision, of native execution")
            if pack is None:
                raise ConfigError(
                    "native execution needs packed weights", where="Learner(pack=...)", fix="pass RolloutWeights.pack"
                )
        self._pack, self._packed = pack, dict[int, PackedModel]()
        self.alignment, self.comparisons = alignment, dict[tuple[int, str], Comparison]()
        self._version, self._places = 0, places(arch, precision)
        self.arch, self.kernels, self.config, self.objective = arch, kernels, config, objective_config
        self.rollout_precision, self.total_steps, self.seed = rollout_precision, total_steps, seed
        self.max_response_tokens = max_response_tokens
        dtype = torch.float32 if rollout_precision.exact else torch.bfloat16
        make = partial(
            make_parameters, arch, precision=precision, kernels=kernels, publish_dtype=dtype, device=self.device
        )
        self.parameters = make(tensors, rollout_precision=rollout_precision)
        self.optimiser = Optimiser(
            self.parameters.masters,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
            ranks=self.ranks,
        )
        self._tables = arch.rope_tables(n_positions)
        self._budget = config.max_tokens_per_microbatch or tokens_that_fit(
            arch, config.activation_memory_mb, checkpointing=config.activation_checkpointing
        )
        self._settings = policy_settings(objective_config)
        self._correction = correction or objective.make_correction(
            objective_config.correction, **objective_config.correction_options
        )
        objective.require_compatible(self._settings, self._correction)
        segmenter = objective.make_segmenter(objective_config.segmenter, **objective_config.segmenter_options)
        self._monitor = Monitor(segmenter, delimiters)
        if isinstance(self._correction, objective.Triage):
            self._monitor.triage = self._correction
        self._reference = None
        if self._settings.kl is not None:
            self._reference = make(reference or tensors)

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Refuse rollouts that this learner cannot score.

        Raises:
            SpecMismatchError: another precision or spec, or unequal sampling distributions in one batch.
            DataError: malformed trajectories.
        """
        first = trajectories[0].sampling
        layouts: set[str] = set()
        for t in trajectories:
            t.check(self.arch.vocab_size)
            if t.precision is not self.rollout_precision:
                require_same(self.rollout_precision, t.precision, where=f"trajectory group {t.group} sample {t.sample}")
            if not t.sampling.same_distribution(first):
                raise SpecMismatchError(
                    f"one batch holds {t.sampling} and {first}",
                    where=f"trajectory group {t.group}",
                    expected="equal temperature, top_k, top_p and min_p for all samples of a step",
                )
            if self.alignment is not None and t.guidance is not None and t.guidance.layout not in layouts:
                layouts.add(t.guidance.layout)
                read_layout(t.guidance.layout).require_places(
                    self._places, where=f"trajectory group {t.group} sample {t.sample}"
                )

    @torch.no_grad()
    def score(self, trajectories: Sequence[Trajectory], parameters: Parameters | None = None) -> Scored:
        """Log-probs of the sampled tokens under the current weights (or ``parameters``), without gradient."""
        tokens = Tokens.of(trajectories)
        rows = rows_of_samples(trajectories)
        found = torch.zeros(2, len(tokens.ids))
        for part in self._passes(trajectories):
            batch = self._collate([trajectories[i] for i in part.samples])
            logp, entropy = self._forward(batch, parameters or self.parameters)
            if part.counts:
                found[:, torch.cat([rows[i] for i in part.samples])] = torch.stack([logp, entropy])
        logp, entropy = self.ranks.add(found)  # every row is one rank's
        return Scored(logp, tokens.rollout_logp, tokens.mask, tokens.sequence, tokens.versions, entropy)

    def step(self, trajectories: Sequence[Trajectory], step: int, version: int = 0) -> StepResult:
        """One training step on all samples of one rollout.

        Arguments:
            trajectories: every sample of the step's groups, with rewards (None where scoring failed).
            step: 0-based training step, for the schedule and the order of mini-batches.
            version: the learner's current weight version.

        Raises:
            SpecMismatchError, DataError: see :meth:`check`.
            NumericsError: a log-prob, gradient or weight is not finite; the masters are as before the update.
        """
        self.check(trajectories)
        self._version = version
        rewards = torch.tensor([float("nan") if t.reward is None else t.reward for t in trajectories])
        groups = torch.tensor([t.group for t in trajectories])
        result = objective.advantages(rewards, groups, method=self.objective.advantage)
        metrics = result.metrics.to_dict()
        notes = () if result.warning is None else (result.warning,)
        pull = self._settings.kl is not None and self._settings.kl_on_zero_advantage
        skip = self.objective.skip_zero_advantage and not pull and not self._settings.entropy_coefficient
        kept = [
            i for i, valid in enumerate(result.valid.tolist()) if valid and not (skip and result.advantages[i] == 0.0)
        ]
        metrics["learner/samples"] = float(len(kept))
        signal = bool(result.advantages.any()) or (kept and (pull or self._settings.entropy_coefficient))
        if not kept or not signal:
            return StepResult(metrics, changed=False, warnings=notes)
        valid = [t for t, ok in zip(trajectories, result.valid.tolist()) if ok]
        plan = _Plan.make(self, trajectories, kept, valid, result.advantages, step, version)
        found, changed = self._optimise(plan, step)
        rule = self._correction
        triage = rule if isinstance(rule, objective.Triage) else self._monitor.triage
        # Only now: a step that failed is done again after a resume, and must not count twice in the reference.
        record = plan.record
        assert record is not None
        self._monitor.learn(record)
        if isinstance(self._correction, objective.StatefulCorrection) and plan.memory is not None:
            self._correction = self._correction.with_state(plan.memory)
        decided = Decisions(kept, record, plan.weights, triage)
        return StepResult(metrics | found, changed=changed, warnings=notes, decisions=decided)

    def memory(self) -> dict[str, dict[str, float]]:
        """What diagnosis and correction have learnt, as JSON numbers, for a checkpoint."""
        rule = self._correction
        learnt = rule.state() if isinstance(rule, objective.StatefulCorrection) else {}
        return {"monitor": self._monitor.state(), "correction": learnt}

    def remember(self, memory: Mapping[str, Mapping[str, float]]) -> None:
        """Go on with what :meth:`memory` returned."""
        self._monitor.restore(memory["monitor"])
        if isinstance(self._correction, objective.StatefulCorrection):
            self._correction = self._correction.with_state(memory["correction"])

    def _optimise(self, plan: _Plan, step: int) -> tuple[dict[str, float], bool]:
        factor = rate_factor(self.config.schedule, step, warmup=self.config.warmup_steps, total=self.total_steps)
        metrics = dict(plan.metrics)
        statistics, norms = [], []
        seen = torch.zeros(len(plan.tokens.ids), dtype=torch.float32)
        observer = None if self.alignment is None else self._observer(self.alignment)
        tokens = unguided = 0
        changed = False
        order = np.random.Generator(np.random.Philox(key=[self.seed, 2**62 + step]))  # apart from the order of prompts
        for epoch in range(self.config.epochs):
            members = (
                np.arange(len(plan.samples)) if self.config.minibatches == 1 else order.permutation(len(plan.samples))
            )
            for chunk in np.array_split(members, min(self.config.minibatches, len(members))):
                share = len(members) / len(chunk)
                for one in self._passes([plan.samples[i] for i in chunk]):
                    part = [int(chunk[i]) for i in one.samples]
                    batch = self._collate([plan.samples[i] for i in part])
                    loss, stats, logp = self._loss(plan, part, batch, observer)
                    (loss * (share if one.counts else 0.0)).backward()
                    if not one.counts:
                        continue
                    statistics.append(stats)
                    if epoch == 0:
                        seen[torch.cat([plan.rows[i] for i in part])] = logp
                        wanted = sum(len(plan.samples[i]) - 1 for i in part)
                        tokens += wanted
                        unguided += wanted if batch.guidance is None else batch.guidance.unguided
                norms.append(self.optimiser.step(self.parameters.take_gradients(), factor))
                changed |= self.parameters.refresh()
                self._packed.pop(id(self.parameters), None)
        if self.ranks.size > 1:
            statistics = joined_statistics(self.ranks, statistics)
            seen = self.ranks.add(seen)
            tokens, unguided = (int(n) for n in self.ranks.add(torch.tensor([tokens, unguided])))
            if observer is not None:
                observer.found = first_found(self.ranks, observer.found)
        metrics |= objective.read(objective.merge(statistics))
        if plan.record is None:
            # A single update: its own forward pass has scored every token at the weights it began with.
            plan.record = self._monitor.record(plan.tokens, seen, plan.advantages, plan.version)
        metrics |= self._monitor.look(plan.record, plan.weights)
        if self.config.execution == "native":
            same = plan.record.mask & (plan.record.versions == plan.version)
            metrics["parity/max_gap"] = float(plan.record.gap[same].abs().max()) if bool(same.any()) else 0.0
        if observer is not None:
            metrics |= observer.metrics()
            metrics["align/unguided"] = unguided / tokens
            records = [t.guidance for t in plan.samples if t.guidance is not None]
            assert self.alignment is not None
            if old := sum(len(r) for r in records if too_old(r, self.alignment, plan.version)):
                metrics["align/stale"] = old / tokens
            sizes = [0 if t.guidance is None else t.guidance.bytes_per_token for t in plan.samples]
            metrics["align/bytes_per_token"] = sum(sizes) / len(sizes)
            self.comparisons = observer.found
        metrics["optim/grad_norm"] = float(np.mean(norms))
        metrics["optim/lr"] = self.config.lr * factor
        metrics["optim/updates"] = float(len(norms))
        return metrics, changed

    def _loss(
        self, plan: _Plan, part: list[int], batch: LearnerBatch, observer: Observer | None
    ) -> tuple[Tensor, objective.Statistics, Tensor]:
        logp, entropy = self._forward(
            batch, self.parameters, observer, with_entropy_gradient=bool(self._settings.entropy_coefficient)
        )
        rows = torch.cat([plan.rows[i] for i in part])
        tokens = objective.LossInput(
            logp=logp,
            advantages=plan.advantages[rows],
            mask=plan.counted[rows],
            sequence_index=plan.sequence[rows],
            scale=plan.scale[rows],
            old_logp=None if plan.old_logp is None else plan.old_logp[rows],
            rollout_logp=batch.rollout_logprobs,
            weights=None if plan.weights is None else plan.weights[rows],
            reference_logp=None if plan.reference_logp is None else plan.reference_logp[rows],
            entropy=entropy if self._settings.entropy_coefficient else None,
        )
        result = objective.policy_loss(tokens, self._settings)
        statistics = result.metrics | {"entropy/mean": objective.mean_of(entropy[batch.mask])}
        return result.loss, statistics, logp.detach()

    def _forward(
        self,
        batch: LearnerBatch,
        parameters: Parameters,
        observer: Observer | None = None,
        *,
        with_entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        batch = batch.to(self.device)
        run = self._execution(batch, parameters, observer)

        def whole() -> tuple[Tensor, Tensor]:
            states = hidden_states(self.arch, run, batch.ids).index_select(0, batch.rows)
            logits = run.head(states)
            logp = token_logprobs(self.kernels, logits, batch.targets, batch.temperature, batch.supports)
            seen = logits if with_entropy_gradient else logits.detach()
            return logp, objective.token_entropy(seen, batch.mask, temperature=positive_temperature(batch.temperature))

        logp, entropy = parameters.run(whole)
        return logp.cpu(), entropy.cpu()  # losses and statistics are over a number a token

    def _execution(self, batch: LearnerBatch, parameters: Parameters, observer: Observer | None) -> AutogradExecution:
        checkpointing = self.config.activation_checkpointing
        if self.config.execution == "native":
            weights, tables = self.packed_weights(parameters), self._tables
            return NativeExecution(
                parameters, weights, batch, self.kernels, tables, activation_checkpointing=checkpointing
            )
        return AutogradExecution(
            parameters,
            batch,
            self.kernels,
            self._tables,
            activation_checkpointing=checkpointing,
            # other weights than the rollout's (a KL reference) have roundings of their own
            guidance=batch.guidance if parameters is self.parameters else None,
            method=TRACE if self.alignment is None else self.alignment.method,
            observer=observer,
            bf16_products=self.config.products == "bf16",
        )

    def packed_weights(self, parameters: Parameters | None = None) -> PackedModel:
        """The present weights (or ``parameters``) packed, for native execution."""
        parameters = parameters or self.parameters
        packed = self._packed.get(id(parameters))
        if packed is None:
            assert self._pack is not None
            packed = self._pack(dict(parameters.published()) | parameters.published_scales())
            self._packed[id(parameters)] = packed
        return packed

    def _passes(self, samples: Sequence[Trajectory]) -> list[Pass]:
        lengths, ranks = [len(t) for t in samples], self.ranks
        return passes(lengths, self._budget, packing=self.config.packing, rank=ranks.rank, size=ranks.size)

    def _observer(self, alignment: Alignment) -> Observer:
        return Observer(self.kernels, alignment.measured_tokens, thorough=alignment.thorough)

    def _collate(self, samples: Sequence[Trajectory]) -> LearnerBatch:
        return collate(
            samples,
            packing=self.config.packing,
            replay_routes=self.config.router_replay,
            alignment=self.alignment,
            moe_layers=self.arch.moe_layers,
            version=self._version,
            kernels=self.kernels,
        )


def policy_settings(config: ObjectiveConfig) -> objective.PolicySettings:
    """The objective's settings from the configuration section."""
    return objective.PolicySettings(
        ratio=config.ratio,
        proximal=config.proximal,
        eps_low=config.eps_low,
        eps_high=config.eps_high,
        dual_clip=config.dual_clip,
        kl=config.kl_estimator if config.kl_coef else None,
        kl_coefficient=config.kl_coef,
        entropy_coefficient=config.entropy_coef,
    )


@dataclass(eq=False)
class _Plan:
    """What is fixed before the first update of a step, flat over the response tokens of the samples trained on.

    ``record`` is there from the start where the tokens had to be scored before, else after the single update.
    """

    samples: list[Trajectory]
    rows: list[Tensor]
    advantages: Tensor
    counted: Tensor
    sequence: Tensor
    scale: Tensor
    old_logp: Tensor | None
    weights: Tensor | None
    reference_logp: Tensor | None
    metrics: dict[str, float]
    tokens: Tokens
    version: int
    record: objective.CorrectionInput | None
    memory: Mapping[str, float] | None

    @classmethod
    def make(
        cls,
        learner: Learner,
        trajectories: Sequence[Trajectory],
        kept: list[int],
        valid: Sequence[Trajectory],
        advantages: Tensor,
        step: int,
        version: int,
    ) -> _Plan:
        samples = [trajectories[i] for i in kept]
        tokens = Tokens.of(samples)
        sequence, mask = tokens.sequence, tokens.mask
        per_token = advantages[torch.tensor(kept)][sequence]
        config = learner.config
        several = config.epochs > 1 or config.minibatches > 1
        old_logp = weights = rejected = reference_logp = record = memory = None
        metrics: dict[str, float] = {}
        if learner._correction.name != "none" or several:
            scored = learner.score(samples)
            old_logp = scored.logp if several else None
            record = learner._monitor.record(tokens, scored.logp, per_token, version)
            corrected = learner._correction(record)
            memory = corrected.state
            weights, rejected = corrected.weights, corrected.rejected
            metrics |= objective.read(corrected.metrics)
        if learner._reference is not None:
            reference_logp = learner.score(samples, learner._reference).logp
        counted = objective.counted_tokens(mask, rejected, count_rejected=learner.objective.count_rejected)
        # Samples without advantage are left out of the passes but not of the denominators: skipping them changes no gradient.
        total = objective.BatchCounts(
            tokens=sum(int(t.mask.sum()) for t in valid) - int((mask & ~counted).sum()),
            sequences=sum(bool(t.mask.any()) for t in valid),
        )
        method = learner.objective.denominator
        scale = objective.token_scale(
            counted,
            sequence,
            total,
            method,
            max_tokens=learner.max_response_tokens if method == "constant" else None,
        )
        return cls(
            samples,
            rows_of_samples(samples),
            per_token,
            counted,
            sequence,
            scale,
            old_logp,
            weights,
            reference_logp,
            metrics,
            tokens,
            version,
            record,
            memory,
        )
