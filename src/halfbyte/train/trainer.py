"""The closed loop: rollout in FP4, reward, update, publish; with evaluation, metrics and exact resume around it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from halfbyte.config import Config
from halfbyte.envs import Environment, Prompt
from halfbyte.errors import NumericsError, RefitError, UserError
from halfbyte.guidance.choice import choose
from halfbyte.guidance.plan import Plan
from halfbyte.learner.learner import Learner
from halfbyte.learner.ranks import any_of, shared
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.weights import RolloutWeights
from halfbyte.train.alignment import is_automatic
from halfbyte.train.collect import prompt_keys
from halfbyte.train.evaluate import scores
from halfbyte.train.feed import Feed, GroupFeed, Source, StepFeed
from halfbyte.train.flight import Flight
from halfbyte.train.parity import explain, require_parity
from halfbyte.train.progress import RunProgress
from halfbyte.train.prompts import prompt_index
from halfbyte.train.rollouts import Job, Rollouts
from halfbyte.train.run_folder import RunFolder
from halfbyte.train.saved import add_decisions, saved_rows
from halfbyte.train.state import Progress, save_state
from halfbyte.train.step_metrics import ages, mean, rollout_metrics
from halfbyte.train.tracker import Tracker
from halfbyte.train.weights import WayOfWeights

__all__ = ["Trainer"]


class Trainer:
    """Runs steps until the end, a request to stop, or an error.

    Arguments:
        rollouts: where episodes are played.
        weights: the way from the learner to the rollouts, open at ``progress.version``.
        progress: where to go on; ``Progress()`` for a new run.
        guidance: what rollouts record at first; ``alignment.layers = auto`` narrows it after the first update.
        flight: what the checkpoint of ``progress`` holds besides.

    Attributes:
        stop: set it (from a signal handler) to end after the current step with a checkpoint.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        rollouts: Rollouts,
        learner: Learner,
        environment: Environment,
        tokenizer: Tokenizer,
        tracker: Tracker,
        weights: WayOfWeights,
        progress: Progress,
        guidance: Plan,
        flight: Flight | None = None,
    ) -> None:
        self.weights = weights
        self.config, self.folder, self.rollouts, self.learner = config, folder, rollouts, learner
        self.environment, self.tokenizer, self.tracker, self.progress = environment, tokenizer, tracker, progress
        self.guidance = guidance
        if progress.guidance is not None:
            self._settle()
        self.stop = False
        self._said: set[str] = set()
        self._since = time.monotonic()
        rollout = config.rollout
        self.sampling = SamplingParams(
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
            max_tokens=rollout.max_tokens,
            stop=tuple(rollout.stop),
            seed=config.train.seed,
        )
        source = Source(
            prompts=lambda step: self._prompts("train", step * rollout.prompts_per_step, rollout.prompts_per_step),
            sampling=self.sampling,
            samples=rollout.samples_per_prompt,
            per_step=rollout.prompts_per_step,
            steps=config.train.steps,
            staleness=rollout.staleness,
            bound=not rollout.in_flight,
        )
        self.feed: Feed = (GroupFeed if rollout.partial else StepFeed)(rollouts, source, progress.step, flight)

    def run(self) -> bool:
        """Train; returns False if stopped before the last step. A checkpoint is written at the end either way.

        Raises:
            UserError: in mid-run; the steps done so far are in a checkpoint, except where a weight is not finite or
                cannot be published.
        """
        try:
            return self._run()
        except UserError as error:
            agreed = error.common or self.learner.ranks.size == 1
            strikes_in_mid_step = isinstance(error, NumericsError | RefitError)
            if self.progress.step and agreed and not strikes_in_mid_step:
                self._save_what_is_whole()
            raise

    def _run(self) -> bool:
        config, progress = self.config, self.progress
        ranks = self.learner.ranks
        with RunProgress(config.train.steps, progress.step, quiet=ranks.rank > 0) as display:
            self._warn_of_staleness(display)
            if progress.step == 0:
                row = self._evaluate()
                progress.accuracy_before = row["eval/accuracy"]
                display.say(f"held-out accuracy before: {row['eval/accuracy']:.3f}")
            while progress.step < config.train.steps and not any_of(ranks, self.stop):
                row = self._step(display)
                progress.step += 1
                self._record(progress.step, "train", row)
                every = config.eval.every
                if every and progress.step % every == 0 and progress.step < config.train.steps:
                    self._evaluate()
                if config.train.checkpoint_every and progress.step % config.train.checkpoint_every == 0:
                    self._save()
                display.step(progress.step, _note(row))
            if progress.step >= config.train.steps:
                row = self._evaluate()
                display.say(
                    f"held-out accuracy after: {row['eval/accuracy']:.3f} "
                    f"[{row['eval/accuracy_low']:.3f}, {row['eval/accuracy_high']:.3f}]"
                )
            self._save()
        return progress.step >= config.train.steps

    def summary(self) -> dict[str, object]:
        """What ``summary.json`` holds, from the metrics of the run."""
        rows = self.folder.rows()
        evaluations = [r for r in rows if r["kind"] == "eval"]
        trained = [r for r in rows if r["kind"] == "train" and "gap/k3_kl" in r]
        last = evaluations[-1]
        return {
            "accuracy_before": self.progress.accuracy_before,
            "accuracy_after": last["eval/accuracy"],
            "accuracy_interval": [last["eval/accuracy_low"], last["eval/accuracy_high"]],
            "steps": self.progress.step,
            "wall_seconds": self.progress.wall_seconds,
            "rollout_seconds": self.progress.rollout_seconds,
            "learner_seconds": self.progress.learner_seconds,
            "k3_kl": mean([r["gap/k3_kl"] for r in trained]) if trained else None,
            "mean_abs_gap": mean([r["gap/mean_abs"] for r in trained]) if trained else None,
            "seed": self.config.train.seed,
            "precision": self.learner.rollout_precision.name,
            "learner_precision": self.learner.parameters.precision.name,
            "kernels": self.learner.kernels.name,
            "weight_version": self.progress.version,
        }

    def _prompts(self, split: str, first: int, count: int) -> tuple[Prompt, ...]:
        size = self.environment.size(split)  # type: ignore[arg-type]
        if split == "eval":
            total = count if size is None else min(count, size)
            return tuple(self.environment.prompt("eval", i) for i in range(total))
        seed = self.config.train.seed
        return tuple(self.environment.prompt("train", prompt_index(first + i, size, seed)) for i in range(count))

    def _step(self, display: RunProgress) -> dict[str, float]:
        config, progress = self.config, self.progress
        start = time.perf_counter()
        trajectories = self.feed.next(progress.step)
        rolled = time.perf_counter()
        rows = self._rows_to_save(trajectories)
        scored = time.perf_counter()
        if config.learner.require_parity:
            self._require_parity(trajectories)
        flight = self._flight_metrics(trajectories, rolled - start)
        result = self.learner.step(trajectories, progress.step, progress.version)
        for note in result.warnings:
            if note not in self._said:
                self._said.add(note)
                display.say(f"warning: {note}")
        self._say_why_nothing_scored(trajectories, display)
        learned = time.perf_counter()
        if rows:
            add_decisions(rows, result.decisions)
            self.folder.save_trajectories(progress.step + 1, rows)
        refit: dict[str, float] = {}
        if result.changed:
            refit = self.weights.publish(progress.version + 1)
            progress.version += 1
        self._choose_guidance(display)
        published = time.perf_counter()
        progress.rollout_seconds += rolled - start
        progress.learner_seconds += learned - scored
        row = result.metrics | rollout_metrics(trajectories) | flight | refit
        tokens, seconds = float(sum(int(t.mask.sum()) for t in trajectories)), time.perf_counter() - start
        row |= {
            "version": float(progress.version),
            "tokens/rollout": tokens,
            "time/rollout": rolled - start,
            "time/learner": learned - scored,
            "time/publish": published - learned,
            "time/step": seconds,
            "time/tokens_per_second": tokens / seconds,
        }
        return row

    def _flight_metrics(self, trajectories: Sequence[Trajectory], waited: float) -> dict[str, float]:
        """How old the tokens of a step are, and what is under way; nothing for a synchronous run."""
        rollout = self.config.rollout
        if not (rollout.staleness or rollout.overlap):
            return {}
        found = ages(trajectories, self.progress.version)
        idle = (
            {"time/idle_learner": waited, "time/idle_rollout": self.rollouts.idle_seconds()} if rollout.overlap else {}
        )
        return found | self.feed.counts() | idle

    def _warn_of_staleness(self, display: RunProgress) -> None:
        """Settings that are meant for tokens of the present weights, in a run that has older ones."""
        rollout, objective = self.config.rollout, self.config.objective
        if not rollout.staleness:
            return
        if objective.correction == "none" and objective.proximal == "learner":
            display.say(
                f"warning: rollout.staleness = {rollout.staleness}, and nothing corrects old tokens; "
                f'objective.correction = "token_tis" does, or objective.proximal = "rollout"'
            )
        lag = self.config.alignment.max_version_lag
        if self.learner.alignment is not None and lag < rollout.staleness:
            display.say(
                f"note: guidance of weights more than {lag} updates old is not used (alignment.max_version_lag)"
            )

    def _require_parity(self, trajectories: Sequence[Trajectory]) -> None:
        """Before the update, so that nothing is lost."""
        learner = self.learner
        require_parity(
            learner.score(trajectories),
            trajectories,
            self.progress.version,
            lambda t: explain(self._served(), learner.packed_weights(), learner.parameters, t),
        )

    def _served(self) -> RolloutWeights:
        """What rollouts run on: theirs, or packed here as they would, where they are out of reach."""
        here, learner = self.rollouts.weights, self.learner
        if here is not None:
            return here
        parameters = learner.parameters
        tensors = dict(parameters.published()) | parameters.published_scales()
        return RolloutWeights.pack(
            learner.arch,
            learner.rollout_precision,
            tensors,
            learner.kernels,
            version=self.progress.version,
            n_positions=learner.arch.max_positions,
        )

    def _choose_guidance(self, display: RunProgress) -> None:
        """Once, after the first update: what ``auto`` keeps."""
        config, found = self.config.alignment, self.learner.comparisons
        if not (is_automatic(config) and self.guidance and self.progress.guidance is None and found):
            return
        assert config.bytes_per_token is not None
        arch, precision = self.learner.arch, self.learner.rollout_precision
        plan = choose(self.guidance, found, arch, precision, config.bytes_per_token)
        self.rollouts.guide(plan)
        self.progress.guidance = plan.to_json()
        self._settle()
        size = plan.formula_bytes(arch, precision)
        display.say(f"guidance: {len(plan)} of {len(self.guidance)} places, {size:.1f} bytes a token")

    def _settle(self) -> None:
        """The plan is fixed: measure for the metrics only from now on."""
        if self.learner.alignment is not None:
            tokens = self.config.alignment.measured_tokens
            self.learner.alignment = replace(self.learner.alignment, thorough=False, measured_tokens=tokens)

    def _rows_to_save(self, trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
        train, step = self.config.train, self.progress.step
        if not train.save_trajectories_every or step % train.save_trajectories_every:
            return []
        method = self.config.objective.advantage
        return saved_rows(trajectories, train.saved_trajectories, self.learner, self.tokenizer, method)

    def _say_why_nothing_scored(self, trajectories: Sequence[Trajectory], display: RunProgress) -> None:
        """Once, if a whole step has no reward: a broken reward function must not look like a slow start."""
        errors = [str(t.info["error"]) for t in trajectories if t.reward is None and t.info.get("error")]
        if errors and all(t.reward is None for t in trajectories) and "scoring" not in self._said:
            self._said.add("scoring")
            display.say(
                f"warning: scoring failed for every sample of a step; the last line of the first traceback:\n"
                f"  {errors[0].strip().splitlines()[-1]}"
            )

    def _evaluate(self) -> dict[str, float]:
        done = [r for r in self.folder.rows() if r["kind"] == "eval" and r["step"] == self.progress.step]
        done = shared(self.learner.ranks, done)
        if done:  # a run killed after this evaluation has its row already
            return dict(done[-1])
        config = self.config.eval
        sampling = SamplingParams(**{**asdict(self.sampling), "temperature": config.temperature})
        prompts = self._prompts("eval", 0, config.prompts)
        keys = prompt_keys(("eval",), prompts)
        row = scores(self.rollouts.play(Job(-1, prompts, keys, sampling, config.samples, recorded=False)), len(prompts))
        self._record(self.progress.step, "eval", row)
        return row

    def _record(self, step: int, kind: str, row: dict[str, float]) -> None:
        self.folder.append({"step": step, "kind": kind, **row})
        self.tracker.log(row, step)

    def _save(self) -> None:
        now = time.monotonic()
        self.progress.wall_seconds += now - self._since
        self._since = now
        flight = self.feed.flight()
        keep = self.config.train.keep_checkpoints
        save_state(self.folder.path / "checkpoints", self.learner, self.progress, keep, flight)

    def _save_what_is_whole(self) -> None:
        """After an error; the checkpoint before stays the newest where the rollouts cannot hand over what is in flight."""
        with suppress(UserError):
            self.feed.flight()
            self._save()


def _note(row: dict[str, float]) -> str:
    parts = [f"reward {row['reward/mean']:.3f}"] if "reward/mean" in row else ["no reward"]
    parts += [f"k3 {row['gap/k3_kl']:.1e}"] if "gap/k3_kl" in row else ["no signal"]
    parts += [f"{row['time/rollout']:.2f}+{row['time/learner']:.2f} s"]
    return "  ".join(parts)
