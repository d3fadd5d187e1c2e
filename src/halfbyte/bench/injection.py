"""``halfbyte bench injection``: which quadrant's mismatch harms learning, and what corrections recover.

Each cell trains the packaged policy for a few steps in an exact run (rollout and learner agree to rounding) with a gap
injected into one quadrant (``halfbyte.objective.injection``), under one correction and one seed. A finished cell is one
line of a JSON-lines file; called again, the bench does what is missing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from halfbyte.config import EnvConfig, LearnerConfig, ObjectiveConfig
from halfbyte.envs import Environment, make_env
from halfbyte.errors import ConfigError, DataError
from halfbyte.kernels import active
from halfbyte.learner.learner import Learner
from halfbyte.models.open_model import open_model
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import SamplingParams
from halfbyte.objective import CORRECTIONS, QUADRANTS, make_correction
from halfbyte.objective.injection import GapInjection, InjectedCorrection, Tail
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.train.collect import collect
from halfbyte.train.evaluate import evaluate

__all__ = ["CLEAN", "Cell", "Difference", "Study", "differences", "plan", "read", "run"]

CLEAN = "clean"
"""In place of a quadrant: nothing is injected."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What all cells share.

    Arguments:
        env, max_tokens: the task, and response tokens.
        prompts, samples, steps, lr, schedule: of training.
        scale, tail, share, density, block, unlikely, largest: the injected gap, see ``GapInjection``.
        start: steps before the injection begins.
        eval_prompts: held-out prompts, two responses each.
    """

    env: str = "arithmetic:sort"
    max_tokens: int = 16
    prompts: int = 24
    samples: int = 8
    steps: int = 60
    lr: float = 3e-4
    schedule: Literal["linear", "constant", "cosine"] = "linear"
    scale: float = 1.5
    tail: Tail = "exponential"
    share: float = 0.7
    density: float = 0.7
    block: int = 4
    unlikely: bool = False
    largest: float = 6.0
    start: int = 10
    eval_prompts: int = 384

    def __post_init__(self) -> None:
        self.injection(QUADRANTS[0], 0)

    def injection(self, quadrant: str, seed: int) -> GapInjection:
        """What is injected into ``quadrant``.

        Raises:
            ConfigError: a value is out of range.
        """
        names = ("scale", "tail", "share", "density", "block", "unlikely", "largest", "start")
        return GapInjection(quadrant=quadrant, seed=seed, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True, order=True)
class Cell:
    """One run: a quadrant (or ``CLEAN``), a correction and a seed."""

    seed: int
    quadrant: str
    correction: str


@dataclass(frozen=True)
class Difference:
    """A mean over seeds of differences between two kinds of run with the same seed, with a 95% t interval."""

    quadrant: str
    correction: str
    seeds: int
    accuracy: float
    mean: float
    low: float
    high: float


def plan(quadrants: Sequence[str], corrections: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """All cells, seed by seed; the clean run comes first, under ``none`` and under every correction.

    Raises:
        ConfigError: an unknown quadrant or correction.
    """
    for name, values, known in (("quadrants", quadrants, QUADRANTS), ("corrections", corrections, tuple(CORRECTIONS))):
        for value in values:
            if value not in known:
                raise ConfigError(f"{name} has {value!r}", where=name, expected=", ".join(known))
    kinds = [(CLEAN, "none")] + [(q, c) for q in (CLEAN, *quadrants) for c in corrections]
    return [Cell(seed, *kind) for seed in seeds for kind in dict.fromkeys(kinds)]


def read(path: Path, study: Study) -> dict[Cell, dict[str, Any]]:
    """Finished cells of this study; a line that a kill cut off is dropped.

    Raises:
        DataError: the file belongs to another study.
    """
    rows: dict[Cell, dict[str, Any]] = {}
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["study"] != asdict(study):
            changed = [k for k, v in asdict(study).items() if row["study"].get(k) != v]
            raise DataError(
                f"the file holds cells of a study with another {', '.join(changed)}",
                where=str(path),
                fix="name another file, or the same settings",
            )
        rows[Cell(row["seed"], row["quadrant"], row["correction"])] = row
    return rows


def run(study: Study, cells: Sequence[Cell], path: Path, say: Callable[[str], None]) -> dict[Cell, dict[str, Any]]:
    """Do what is missing and append it to ``path``; returns the rows of all cells."""
    done = read(path, study)
    path.parent.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        if cell in done:
            continue
        row = {**asdict(cell), **_train(study, cell), "study": asdict(study)}
        with path.open("a", encoding="utf-8") as file:
            if file.tell() and not _ends_whole(path):
                file.write("\n")
            file.write(json.dumps(row) + "\n")
        done[cell] = row
        say(f"seed {cell.seed} {cell.quadrant} {cell.correction}: accuracy {row['accuracy']:.3f}, {row['cpu']:.0f} s")
    return {cell: done[cell] for cell in cells}


def _ends_whole(path: Path) -> bool:
    return path.read_bytes().endswith(b"\n")


def differences(
    rows: Mapping[Cell, Mapping[str, Any]], *, against: Callable[[Cell], Cell], key: str = "accuracy"
) -> Iterator[Difference]:
    """For each kind of run the difference to another kind, paired by seed.

    Arguments:
        against: from a cell the one to compare it with; seeds that lack either are left out.
        key: of the rows.
    """
    kinds = dict.fromkeys((c.quadrant, c.correction) for c in rows)
    for quadrant, correction in kinds:
        cells = [c for c in rows if (c.quadrant, c.correction) == (quadrant, correction) and against(c) in rows]
        values = [float(rows[c][key]) for c in cells]
        deltas = [value - float(rows[against(c)][key]) for c, value in zip(cells, values)]
        if deltas:
            mean, half = _interval(deltas)
            yield Difference(
                quadrant, correction, len(deltas), sum(values) / len(values), mean, mean - half, mean + half
            )


#: 97.5% quantiles of Student's t with 1, 2, ... degrees of freedom (Gosset 1908)
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of its 95% t interval; infinite for a single value."""
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return mean, math.inf
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    t = _T975[n - 2] if n - 2 < len(_T975) else 2.131
    return mean, t * deviation / math.sqrt(n)


def _train(study: Study, cell: Cell) -> dict[str, Any]:
    begun = time.process_time()
    checkpoint, tokenizer = open_model("tiny")
    kernels, precision = active(), precision_from("fp32")
    environment: Environment = make_env(study.env)
    injection = None if cell.quadrant == CLEAN else study.injection(cell.quadrant, cell.seed)
    longest = EnvConfig().max_prompt_tokens
    longest = min(checkpoint.architecture.max_positions, longest + study.max_tokens)
    learner = Learner(
        checkpoint.architecture,
        checkpoint.tensors,
        precision=precision,
        rollout_precision=precision,
        config=LearnerConfig(lr=study.lr, schedule=study.schedule),
        objective_config=ObjectiveConfig(),
        kernels=kernels,
        total_steps=study.steps,
        seed=cell.seed,
        max_response_tokens=study.max_tokens,
        n_positions=longest,
        correction=InjectedCorrection(make_correction(cell.correction), injection),
    )
    engine = Engine(
        checkpoint.architecture,
        precision,
        dict(learner.parameters.published()),
        detokeniser=tokenizer,
        options=EngineOptions(kv_memory_mb=64.0, max_length=longest),
        kernels=kernels,
    )
    sampling = SamplingParams(max_tokens=study.max_tokens, seed=cell.seed)
    version, rewards, gaps, entropies = 0, [], [], []
    for step in range(study.steps):
        prompts = [environment.prompt("train", i) for i in range(step * study.prompts, (step + 1) * study.prompts)]
        batch = collect(engine, environment, tokenizer, prompts, sampling, samples=study.samples, key=("train", step))
        result = learner.step(batch, step, version)
        if result.changed:
            version += 1
            engine.load_weights(dict(learner.parameters.published()), version)
        rewards.append(sum(t.reward or 0.0 for t in batch) / len(batch))
        gaps.append(result.metrics.get("injected/mean_abs", 0.0))
        entropies.append(result.metrics.get("entropy/mean", 0.0))
    held_out = [environment.prompt("eval", i) for i in range(study.eval_prompts)]
    found = evaluate(engine, environment, tokenizer, held_out, sampling, samples=2)
    last = max(1, study.steps // 4)
    return {
        "accuracy": found["eval/accuracy"],
        "accuracy_low": found["eval/accuracy_low"],
        "accuracy_high": found["eval/accuracy_high"],
        "reward": [round(r, 4) for r in rewards],
        "reward_last": sum(rewards[-last:]) / last,
        "injected": sum(gaps[-last:]) / last,
        "entropy": sum(entropies[-last:]) / last,
        "cpu": time.process_time() - begun,
    }
