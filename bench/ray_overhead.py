"""What a step costs more with one worker on Ray than in one process: a random mixture of experts of 5M parameters.

    python bench/ray_overhead.py [--pairs 4] [--steps 10]

Runs alternate, with the same seeds, so that the n-th steps of a pair do the same work; one thread each. The first two steps of
a run are left out. What else runs on the machine hits both sides, but not evenly: the table has the median and the 20th
percentile of the step, and the median of the ratio of paired steps. ``beside_play`` is what lies between a step's request and
its trajectories but is not a worker's playing: transport, waiting, the rest of a refit; it depends least on what else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

for variable in ("OMP_NUM_THREADS", "HALFBYTE_THREADS"):
    os.environ[variable] = "1"

REWARD = """
def sevens(*, response, **_):
    return sum(c in "13579" for c in response) / 16
"""
#: Steps at the beginning of a run that warm it up.
SKIPPED = 2


def make_policy(folder: Path) -> int:
    """A random policy with the character tokenizer; how many parameters it has."""
    from halfbyte.models.checkpoint_writer import save_checkpoint

    make_tiny = runpy.run_path(str(Path(__file__).resolve().parents[1] / "examples" / "make_tiny.py"))
    make_tiny["write_tokenizer"](folder / "tokenizer")
    shape = {"hidden_size": 256, "n_layers": 4, "head_dim": 64, "moe_intermediate_size": 160, "n_experts": 8}
    arch = replace(make_tiny["ARCHITECTURE"], **shape)
    tensors = make_tiny["initial_tensors"](arch, 0)
    save_checkpoint(folder / "model", arch, tensors, tokenizer_from=folder / "tokenizer")
    return sum(t.numel() for t in tensors.values())


def steps_of(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"][SKIPPED:]


def fifth(values: list[float]) -> float:
    """The 20th percentile."""
    return statistics.quantiles(values, n=5)[0]


def main() -> None:
    """Run the pairs; print a table and one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    from halfbyte.config import load_config
    from halfbyte.train import run
    from halfbyte.train.ray.cluster import Cluster
    from halfbyte.train.ray.rollouts import RayRollouts, Sending

    played: list[float] = []
    take_in = RayRollouts._played

    def noting(self: RayRollouts, ref: Any, sending: Sending) -> None:
        take_in(self, ref, sending)
        assert sending.worker.last is not None
        if next(iter(sending.pieces)).job >= 0:  # not an evaluation
            played.append(sending.worker.last.seconds)

    RayRollouts._played = noting  # type: ignore[method-assign]

    times: dict[str, dict[str, list[float]]] = {"local": {}, "ray": {}}
    beside: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "overhead_reward.py").write_text(REWARD)
        sys.path.insert(0, name)
        os.environ["PYTHONPATH"] = os.pathsep.join([name, *filter(None, [os.environ.get("PYTHONPATH")])])
        parameters = make_policy(folder)
        cluster = Cluster(memory_mb=256.0)
        for pair in range(given.pairs):
            seen = []
            for backend in ("local", "ray") if pair % 2 else ("ray", "local"):
                out = folder / f"{backend}-{pair}"
                flags: dict[str, object] = {
                    "model.path": str(folder / "model"),
                    "env.reward": "overhead_reward:sevens",
                    "train.out": str(out),
                    "train.steps": given.steps,
                    "train.seed": pair,
                    "train.checkpoint_every": 0,
                    "train.save_trajectories_every": 0,
                    "learner.schedule": "constant",
                    "eval.prompts": 4,
                    "rollout.prompts_per_step": 16,
                    "rollout.backend": backend,
                }
                played.clear()
                if run(load_config(flags=flags)):
                    raise SystemExit("the run was stopped")
                rows = steps_of(out)
                if backend == "ray":
                    beside += [r["time/rollout"] - s for r, s in zip(rows, played[SKIPPED:], strict=True)]
                for key in ("time/step", "time/rollout", "time/learner", "time/publish"):
                    times[backend].setdefault(key, []).extend(row[key] for row in rows)
                seen.append([{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows])
            assert seen[0] == seen[1], "the backends differ"
        cluster.close()
    result: dict[str, Any] = {"parameters": parameters, "steps": len(times["ray"]["time/step"])}
    for key in times["local"]:
        a, b = times["local"][key], times["ray"][key]
        row = {
            "local_median": statistics.median(a),
            "ray_median": statistics.median(b),
            "local_p20": fifth(a),
            "ray_p20": fifth(b),
            "ratio_of_p20": fifth(b) / fifth(a),
            "median_of_ratios": statistics.median(y / x for x, y in zip(a, b)),
        }
        result[key] = {name: round(value, 4) for name, value in row.items()}
        print(key, "  ".join(f"{name} {value:.3f}" for name, value in row.items()))
    result["beside_play"] = {"median": round(statistics.median(beside), 4), "p20": round(fifth(beside), 4)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
