"""``halfbyte train``: configuration and flags in, a run folder out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from halfbyte.cli import threads as thread_policy
from halfbyte.cli.parameter import flag

__all__ = ["train"]


def train(
    *,
    config: Annotated[Path | None, Parameter(help="TOML file with the run's configuration.")] = None,
    model: Annotated[str | None, Parameter(help="Model folder, or tiny for the policy in the package.")] = None,
    env: Annotated[str | None, Parameter(help="Task, such as arithmetic:sort or reasoning_gym:chain_sum.")] = None,
    precision: Annotated[str | None, Parameter(help="Precision preset of the rollout, such as w4a4kv4.")] = None,
    steps: Annotated[int | None, Parameter(help="Training steps.")] = None,
    seed: Annotated[int | None, Parameter(help="Seed of sampling and of the order of prompts.")] = None,
    out: Annotated[Path | None, Parameter(help="Run folder.")] = None,
    resume: Annotated[bool, flag("Go on with the run in the run folder.")] = False,
    overwrite: Annotated[bool, flag("Replace the run in the run folder.")] = False,
    settings: Annotated[
        tuple[str, ...],
        Parameter("--set"),
        flag("section.key=value; may be repeated."),
    ] = (),
    threads: Annotated[int | None, Parameter(help="Threads; all usable cores by default.")] = None,
    ray_address: Annotated[
        str | None,
        Parameter(help="Play on workers of this Ray cluster: host:port of its head, or auto on one of its nodes."),
    ] = None,
) -> int:
    """Train a policy by reinforcement learning with FP4 rollouts; the run folder ends with report.html."""
    from halfbyte.config import load_config

    flags: dict[str, object] = {
        "model.path": model,
        "env.name": env,
        "precision": precision,
        "train.steps": steps,
        "train.seed": seed,
        "train.out": out,
        "train.threads": threads,
        "rollout.backend": None if ray_address is None else "ray",
    }
    resolved = load_config(config, settings, flags)
    saved = Path(resolved.train.out) / "config.json"
    if resume and config is None and saved.is_file():
        resolved = load_config(saved, settings, flags | {"train.out": resolved.train.out})
    thread_policy.apply(resolved.train.threads)

    from halfbyte.report import build
    from halfbyte.train import run

    code = run(resolved, resume=resume, overwrite=overwrite, ray_address=ray_address)
    if os.environ.get("RANK", "0") != "0":  # of several ranks (torchrun) the first speaks
        return code
    print(f"report: {build(resolved.train.out)}")
    if code == 130:
        print("stopped; the same command with --resume (and without --overwrite) goes on")
    return code
