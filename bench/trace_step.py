"""What TRACE adds to a training step over plain QAT: whole steps of `make demo`, the arms taking turns in one process.

    python bench/trace_step.py [--steps 20] [--quick] [--precision experts-w4a4kv4] [--model FOLDER] [--arms A,B]
                               [--json FILE]

Every arm's step begins from the same weights and optimiser state, plays the same prompts with the same keys (so it draws
the same tokens: they are compared), updates and publishes. Then the weights are put back, off the clock, and the next arm
has its turn, in another order each round; after a round training goes on from the update of ``qat``. Arms:

    qat     the learner's own rounding: alignment.method = "none"
    again   the same, as the control: what it shows is noise
    paper   arXiv 2610.07767: 1 bit, the deeper half of the layers, expert input + KV (dense models: linear inputs + KV)
    full    4 bits, all layers, expert input + intermediate + KV
    default what ``halfbyte train`` does: 1 bit, all layers, every site that rounds

One thread. The clock is the processor time of the process, which depends least on what else runs; wall time is printed
too. Overhead is the median over rounds of (step of the arm / step of plain QAT in this round) - 1, with a 95% interval
from 2,000 bootstrap samples of the rounds; plain QAT is the mean of ``qat`` and ``again``, for ``again`` itself ``qat``.
Whole steps are as noisy as the machine is busy. *Accounted* is the same for the calls alone that guidance adds or
changes: what only guidance calls (storing, reading out, gathering, cutting and measuring codes), and how much longer the
calls take that plain QAT makes as well (the rollout's products, which also write codes, and the learner's rounding). It
leaves out what shows elsewhere, in caches and allocations.

Ctrl-C ends after the rounds that are done. A policy other than the packaged one gets rewards by sample number, since an
untrained one may earn none and would not be updated. It is an error if guidance was not used or did not help.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halfbyte.config import load_config
from halfbyte.envs import Prompt, make_env
from halfbyte.guidance.batch import BatchGuidance, Guide
from halfbyte.guidance.cache import Arena, PassRecord
from halfbyte.guidance.measure import Observer
from halfbyte.kernels import active
from halfbyte.kernels.native import set_thread_count
from halfbyte.learner import autograd
from halfbyte.learner import batch as learner_batch
from halfbyte.learner.learner import Learner
from halfbyte.models.open_model import open_model
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.engine import Engine
from halfbyte.rollout.packed import PackedExecution
from halfbyte.train.alignment import make_alignment
from halfbyte.train.budgets import engine_options
from halfbyte.train.collect import prompt_keys
from halfbyte.train.prompts import prompt_index
from halfbyte.train.rollouts import Job, LocalRollouts
from halfbyte.train.weights import WeightPath

if TYPE_CHECKING:
    from halfbyte.config import Config
    from halfbyte.guidance.batch import Alignment

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo.toml"
#: Parts of a step. In ``collect`` and ``collate`` rows are read out and gathered (in every arm: routes are, too).
PHASES = ("rollout", "collect", "collate", "learner", "refit")
ARMS = ("qat", "again", "paper", "full", "default")
#: Calls that only guidance makes (plain QAT takes 0 there), and two that it changes.
CALLS = ("store", "read out", "gather", "cut", "measure", "products", "round")
BOOTSTRAPS = 2000
#: A policy other than the demo's: fewer, longer sequences, so that a step is seconds long.
LARGE = {"rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 2, "env.max_prompt_tokens": 128}


class Clocks:
    """Seconds by part of a step, of the processor and of the wall; a part inside another counts for itself only."""

    def __init__(self) -> None:
        self.cpu = dict.fromkeys(PHASES, 0.0)
        self.wall = dict.fromkeys(PHASES, 0.0)
        self.calls = dict.fromkeys(CALLS, 0.0)
        self._open: list[str] = []
        self._counting = False
        self._last = (0.0, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the body."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, timed."""

        def call(*args: Any, **options: Any) -> Any:
            with self.part(name):
                return function(*args, **options)

        return call

    def count(self, name: str, owner: Any, *functions: str) -> None:
        """Replace functions of a class or module by ones whose processor time counts as ``name``, beside the parts."""
        for function in functions:
            setattr(owner, function, self._counted(name, getattr(owner, function)))

    def read(self) -> dict[str, dict[str, float]]:
        """What was measured since the last call."""
        out = {"cpu": dict(self.cpu), "wall": dict(self.wall), "calls": dict(self.calls)}
        for held in (self.cpu, self.wall, self.calls):
            held.update(dict.fromkeys(held, 0.0))
        return out

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self._counting:  # part of another counted call
                return function(*args, **options)
            self._counting, start = True, time.process_time()
            try:
                return function(*args, **options)
            finally:
                self.calls[name] += time.process_time() - start
                self._counting = False

        return call

    def _turn(self) -> None:
        now = (time.process_time(), time.perf_counter())
        if self._open:
            self.cpu[self._open[-1]] += now[0] - self._last[0]
            self.wall[self._open[-1]] += now[1] - self._last[1]
        self._last = now


@dataclass(frozen=True, eq=False)
class Arm:
    """How an arm rounds: what the learner does with guidance, and where the engine keeps it (None: nothing is recorded)."""

    name: str
    alignment: Alignment | None
    arena: Arena | None


class Bench:
    """One learner, one engine and one refit store, that every arm uses in turn."""

    def __init__(self, config: Config, names: list[str], folder: Path, *, planted: bool) -> None:
        self.config, self.planted, self.clocks = config, planted, Clocks()
        checkpoint, self.tokenizer = open_model(config.model.path)
        arch, precision = checkpoint.architecture, precision_from(config.precision)
        self.environment = make_env(config.env.name)
        longest = config.env.max_prompt_tokens + config.rollout.max_tokens
        self.learner = Learner(
            arch,
            checkpoint.tensors,
            precision=precision,
            rollout_precision=precision,
            config=config.learner,
            objective_config=config.objective,
            kernels=active(),
            total_steps=config.train.steps,
            max_response_tokens=config.rollout.max_tokens,
            n_positions=longest,
        )
        tensors = dict(self.learner.parameters.published())
        options = engine_options(config, longest)
        self.engine = Engine(arch, precision, tensors, detokeniser=self.tokenizer, options=options)
        self.rollouts = LocalRollouts(
            self.engine, self.environment, self.tokenizer, prompt_limit=config.env.max_prompt_tokens
        )
        self.weights = WeightPath(folder, self.rollouts, self.learner, version=0)
        self.arms = [self._arm(name) for name in names]
        collector, learner = self.engine._collector, self.learner
        collector.collect = self.clocks.timed("collect", collector.collect)  # type: ignore[method-assign]
        learner._collate = self.clocks.timed("collate", learner._collate)  # type: ignore[method-assign]
        count = self.clocks.count
        count("store", PassRecord, "commit")
        count("read out", Arena, "take", "take_kv")
        count("gather", learner_batch, "gather")
        count("cut", BatchGuidance, "at")
        count("cut", Guide, "flat", "select")
        count("measure", Observer, "see", "metrics")
        count("products", PackedExecution, "_routed", "_project")
        count("round", autograd, "guided_round", "fake_quantise")
        self.version = 0

    def _arm(self, name: str) -> Arm:
        """An arm with an arena of its own, so that its memory is as warm as in a run."""
        arch, precision = self.engine.arch, self.engine.precision
        inputs = "expert_in" if arch.n_experts else "linear_in"
        settings: dict[str, dict[str, Any]] = {
            "paper": {"bits": 1, "layers": "deep:0.5", "sites": (inputs, "k", "v")},
            "full": {"bits": 4, "layers": "all", "sites": (*dict.fromkeys((inputs, "expert_mid")), "k", "v")},
            "default": {},
        }
        if name not in settings:
            return Arm(name, None, None)
        section = self.config.alignment.model_copy(update=settings[name])
        alignment, plan = make_alignment(section, arch, precision, precision)
        self.engine.guide(plan)
        return Arm(name, alignment, self.engine.pool.guidance)

    def use(self, arm: Arm) -> None:
        """The next step is this arm's."""
        self.engine.pool.guidance = arm.arena
        self.engine.pool.forget_prefixes()
        self.learner.alignment = arm.alignment

    def step(self, arm: Arm, number: int) -> tuple[dict[str, Any], list[Trajectory]]:
        """One step of ``arm``, as the trainer makes it."""
        prompts, job = self._job(number)
        self.use(arm)
        gc.collect()
        self.clocks.read()
        with self.clocks.part("rollout"):
            trajectories = self.rollouts.play(job)
        if self.planted:
            for t in trajectories:
                t.reward = float(t.sample % 2)
        with self.clocks.part("learner"):
            result = self.learner.step(trajectories, number, self.version)
        if not result.changed:
            raise SystemExit(f"step {number}: the rewards of {len(prompts)} prompts hold nothing to learn")
        with self.clocks.part("refit"):
            self.publish()
        kept = ("gap/mean_abs", "gap/k3_kl", "align/unguided", "align/bytes_per_token", "learner/samples")
        row = {"arm": arm.name, "step": number} | self.clocks.read()
        return row | {key: result.metrics[key] for key in kept if key in result.metrics}, trajectories

    def publish(self) -> None:
        """The learner's weights are the next version."""
        self.weights.publish(self.version + 1)
        self.version += 1

    def snapshot(self) -> dict[str, dict[str, torch.Tensor]]:
        """Masters and optimiser state."""
        held = {"masters": self.learner.parameters.masters, "optimiser": self.learner.optimiser.state()}
        return {name: {key: t.detach().clone() for key, t in part.items()} for name, part in held.items()}

    def restore(self, held: dict[str, dict[str, torch.Tensor]]) -> None:
        """Back to a snapshot, in learner, store and engine."""
        for name, master in self.learner.parameters.masters.items():
            master.copy_(held["masters"][name])
        self.learner.optimiser.load_state(held["optimiser"])
        if self.learner.parameters.refresh():
            self.publish()

    def gaps(self, number: int) -> dict[str, float]:
        """Mean |gap| of every arm with BF16 products, where the gap is large: is guidance used, and does it help?"""
        exact, found = self.learner.config, {}
        for arm in self.arms:
            self.use(arm)
            trajectories = self.rollouts.play(self._job(number)[1])
            self.learner.config = exact.model_copy(update={"products": "bf16"})
            self.learner._version = self.version
            scored = self.learner.score(trajectories)
            self.learner.config = exact
            found[arm.name] = float((scored.logp - scored.rollout_logp)[scored.mask].abs().double().mean())
        return found

    def _job(self, number: int) -> tuple[tuple[Prompt, ...], Job]:
        rollout, seed = self.config.rollout, self.config.train.seed
        size, count = self.environment.size("train"), rollout.prompts_per_step
        places = [prompt_index(number * count + i, size, seed) for i in range(count)]
        prompts = tuple(self.environment.prompt("train", place) for place in places)
        sampling = SamplingParams(temperature=rollout.temperature, max_tokens=rollout.max_tokens, seed=seed)
        keys = prompt_keys(("train", number), prompts)
        return prompts, Job(number, prompts, keys, sampling, rollout.samples_per_prompt)


def measure(bench: Bench, steps: int) -> list[dict[str, Any]]:
    """Rows of all arms: one round to warm up, then ``steps`` rounds that are kept."""
    rows: list[dict[str, Any]] = []
    order = np.random.Generator(np.random.Philox(0))
    bench.step(bench.arms[0], 0)  # the optimiser has a state from here on
    for number in range(1, steps + 2):
        try:
            found = _round(bench, number, order.permutation(len(bench.arms)).tolist())
        except KeyboardInterrupt:
            if not rows:
                raise
            break
        rows += found if number > 1 else []
        print(f"\r{number - 1} of {steps} rounds ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def _round(bench: Bench, number: int, order: list[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    before = bench.snapshot()
    after: dict[str, dict[str, torch.Tensor]] = {}
    drawn: list[Trajectory] = []
    for i in order:
        row, trajectories = bench.step(bench.arms[i], number)
        rows.append(row)
        if bench.arms[i].name == "qat":
            after = bench.snapshot()
        drawn = drawn or trajectories
        same = all(np.array_equal(a.response_ids, b.response_ids) for a, b in zip(drawn, trajectories, strict=True))
        assert same, "recording changed what was drawn"
        bench.restore(before)
    bench.restore(after)
    return rows


def seconds(rows: list[dict[str, Any]], arm: str, clock: str, parts: tuple[str, ...] = PHASES) -> np.ndarray:
    """What parts of an arm's steps took together, a number a round."""
    return np.array([sum(row[clock][part] for part in parts) for row in rows if row["arm"] == arm])


def plain(rows: list[dict[str, Any]], arm: str, clock: str, parts: tuple[str, ...] = PHASES) -> np.ndarray:
    """The same of plain QAT, for comparison with ``arm``."""
    controls = ["qat"] if arm in ("qat", "again") or "again" not in {r["arm"] for r in rows} else ["qat", "again"]
    return np.mean([seconds(rows, control, clock, parts) for control in controls], axis=0)


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """The median, and its 95% bootstrap interval."""
    picks = np.random.Generator(np.random.Philox(1)).integers(0, len(values), (BOOTSTRAPS, len(values)))
    low, high = np.quantile(np.median(values[picks], axis=1), (0.025, 0.975))
    return float(np.median(values)), float(low), float(high)


def summary(rows: list[dict[str, Any]], arms: list[str], gaps: dict[str, float]) -> list[dict[str, Any]]:
    """A row an arm: overheads (shares of the whole step of plain QAT) and what guidance did."""
    out = []
    for arm in arms:
        row: dict[str, Any] = {"arm": arm, "bf16_gap": gaps[arm]}
        for clock in ("cpu", "wall"):
            base, own = plain(rows, arm, clock), seconds(rows, arm, clock)
            row[f"{clock}_seconds"] = float(np.median(own))
            row[f"{clock}_overhead"] = interval(own / base - 1.0)
            own_parts = {p: seconds(rows, arm, clock, (p,)) for p in PHASES}
            row[f"{clock}_phases"] = {p: float(np.median(s)) for p, s in own_parts.items()}
            row[f"{clock}_added"] = {
                p: interval((s - plain(rows, arm, clock, (p,))) / base) for p, s in own_parts.items()
            }
        calls = {c: seconds(rows, arm, "calls", (c,)) - plain(rows, arm, "calls", (c,)) for c in CALLS}
        row["accounted"] = interval(sum(calls.values()) / plain(rows, arm, "cpu"))
        row["accounted_calls"] = {c: float(np.median(s)) for c, s in calls.items()}
        mine = [r for r in rows if r["arm"] == arm]
        for key in ("gap/mean_abs", "gap/k3_kl", "align/unguided", "align/bytes_per_token"):
            if key in mine[0]:
                row[key] = float(np.mean([r[key] for r in mine]))
        out.append(row)
    return out


def check(found: list[dict[str, Any]]) -> None:
    """Guidance was there, and made the gap smaller.

    Raises:
        SystemExit: it was not, or did not.
    """
    plain = next(row for row in found if row["arm"] == "qat")["bf16_gap"]
    for row in found:
        if "align/unguided" in row and not (row["align/unguided"] < 1.0 and row["bf16_gap"] < plain):
            raise SystemExit(f"{row['arm']}: unguided {row['align/unguided']}, gap {row['bf16_gap']} against {plain}")


def show(found: list[dict[str, Any]]) -> None:
    """The tables."""
    for clock, title in (("cpu", "processor time"), ("wall", "wall time")):
        print(
            f"\n{title:<16}{'step ms':>9}  {'overhead over qat [95%]':<26}"
            + "".join(f"{p:>10}" for p in PHASES)
            + "  ms"
        )
        for row in found:
            middle, low, high = (100 * v for v in row[f"{clock}_overhead"])
            parts = "".join(f"{1e3 * row[f'{clock}_phases'][p]:>10.1f}" for p in PHASES)
            text = f"{middle:+.1f}% [{low:+.1f}, {high:+.1f}]"
            print(f"{row['arm']:<16}{1e3 * row[f'{clock}_seconds']:>9.1f}  {text:<26}{parts}")
    print(f"\n{'accounted':<16}{'overhead over qat [95%]':<26}" + "".join(f"{c:>10}" for c in CALLS) + "  ms")
    for row in found:
        middle, low, high = (100 * v for v in row["accounted"])
        parts = "".join(f"{1e3 * row['accounted_calls'][c]:>10.1f}" for c in CALLS)
        text = f"{middle:+.1f}% [{low:+.1f}, {high:+.1f}]"
        print(f"{row['arm']:<16}{text:<26}{parts}")
    print("\nadded, % of the whole step of qat (processor time)")
    for row in found:
        parts = "".join(
            f"  {p} {100 * m:+.1f} [{100 * a:+.1f}, {100 * b:+.1f}]" for p, (m, a, b) in row["cpu_added"].items()
        )
        print(f"{row['arm']:<10}{parts}")
    print(f"\n{'guidance':<10}{'guided':>8}{'bytes a token':>15}{'mean |gap|':>12}{'with BF16 products':>20}")
    for row in found:
        share = 1.0 - row.get("align/unguided", 1.0)
        size, gap = row.get("align/bytes_per_token", 0.0), row["gap/mean_abs"]
        print(f"{row['arm']:<10}{share:>8.1%}{size:>15.0f}{gap:>12.1e}{row['bf16_gap']:>20.1e}")


def main() -> None:
    """Measure, print, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="rounds that are kept")
    parser.add_argument("--quick", action="store_true", help="five rounds, to see that it works")
    parser.add_argument("--precision", help="a preset in place of the demo's")
    parser.add_argument("--model", default="tiny", help="a model folder, or the packaged policy")
    parser.add_argument("--arms", default=",".join(ARMS), help="some of them, qat first")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    names = given.arms.split(",")
    if names[0] != "qat" or not set(names) <= set(ARMS):
        parser.error(f"--arms takes some of {', '.join(ARMS)}, qat first")
    planted = given.model != "tiny"
    flags = {"precision": given.precision, "model.path": given.model} | (LARGE if planted else {})
    config = load_config(DEMO, flags=flags)
    steps = 5 if given.quick else given.steps
    torch.set_num_threads(1)
    set_thread_count(1)
    load = [os.getloadavg()]
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(config, names, Path(name) / "refit", planted=planted)
        gaps = bench.gaps(0)
        rows = measure(bench, steps)
    load.append(os.getloadavg())
    found = summary(rows, names, gaps)
    busy = " to ".join(f"{one:.1f}" for one, _, _ in load)
    print(f"{given.model}, {config.precision}, {len(rows) // len(names)} rounds; load {busy} on {os.cpu_count()} cores")
    show(found)
    if given.json:
        head = {"model": given.model, "precision": str(config.precision), "load": load}
        given.json.write_text(json.dumps(head | {"arms": found, "rows": rows}, indent=1))
    check(found)


if __name__ == "__main__":
    main()
