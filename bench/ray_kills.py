"""Kill -9 at random times: workers, the run itself, the cluster's head. The run must come out as if nothing had been.

    python bench/ray_kills.py worker|run|head [--kills 10] [--seed 0] [--steps 200] [--out runs/ray-kills]

``worker``: one run; its workers are killed, one after the other. ``run``: the process that trains is killed and resumed.
``head``: Ray's head (GCS) is killed; the run must end with exit code 2 and a message, and is resumed. At the end metrics and
weights are compared with a run in one process, and the refit store is verified. Prints one JSON object. ``run`` and ``head`` go
on with what an earlier call left in the folder; its kills are not counted. Needs psutil.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from halfbyte.refit.store import FilesystemStore
from halfbyte.refit.verify import verify_store
from halfbyte.train.ray.events import read_events

SOURCE = Path(__file__).resolve().parents[1] / "src"


def start(out: Path, steps: int, *more: str) -> subprocess.Popen[str]:
    """A run of the shipped policy, in small steps."""
    line = [sys.executable, "-m", "halfbyte", "train", "--out", str(out), "--steps", str(steps), "--threads", "1"]
    sets = {
        "rollout.prompts_per_step": 8,
        "rollout.samples_per_prompt": 4,
        "eval.prompts": 16,
        "train.checkpoint_every": 5,
        "alignment.memory_mb": 32,
    }
    for key, value in sets.items():
        line += ["--set", f"{key}={value}"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    log = (out.parent / f"{out.name}.log").open("a")
    return subprocess.Popen([*line, *more], env=environment, stdout=log, stderr=subprocess.STDOUT, text=True)


def on_ray(out: Path, steps: int, *more: str) -> subprocess.Popen[str]:
    """The same with two workers."""
    return start(out, steps, "--set", "rollout.backend=ray", "--set", "rollout.workers=2", *more)


def rows(out: Path) -> list[dict[str, Any]]:
    """Metrics without times; a line that a kill cut off is not counted."""
    found = []
    path = out / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found.append({k: v for k, v in row.items() if not k.startswith("time/")})
    return found


def alive(out: Path) -> list[int]:
    """Workers that play."""
    state: dict[str, dict[str, Any]] = {}
    for event in read_events(out):
        if event["event"] == "connect":
            state = {}
        elif event["event"] == "open":
            state[event["worker"]] = event
        elif event["event"] in ("died", "left", "closed"):
            state.pop(event["worker"], None)
    return [int(e["pid"]) for e in state.values() if psutil.pid_exists(int(e["pid"]))]


def kill_workers(out: Path, steps: int, kills: int, draw: random.Random) -> dict[str, Any]:
    run, done = on_ray(out, steps), 0
    while run.poll() is None and done < kills:
        time.sleep(draw.uniform(0.0, 3.0))
        pids = alive(out)
        if pids and run.poll() is None:
            try:
                psutil.Process(draw.choice(pids)).kill()
                done += 1
            except psutil.NoSuchProcess:
                continue
            time.sleep(1.0)  # until the run has seen it
    return {"kills": done, "codes": [run.wait()]}


def kill_again_and_again(out: Path, steps: int, kills: int, draw: random.Random, *, head: bool) -> dict[str, Any]:
    codes, done = [], 0
    while True:
        more = ["--resume"] if (out / "config.json").is_file() else []
        run, goal = on_ray(out, steps, *more), len(rows(out)) + draw.randint(1, 12)
        while done < kills and run.poll() is None and len(rows(out)) < goal:
            time.sleep(0.1)
        if done < kills and run.poll() is None:
            time.sleep(draw.uniform(0.0, 1.0))
            victims = [psutil.Process(run.pid)]
            if head:
                victims = [p for p in victims[0].children(recursive=True) if p.name() == "gcs_server"]
            for victim in victims:
                victim.kill()
            done += bool(victims)  # the run may have ended meanwhile, and its head with it
        codes.append(run.wait())
        if codes[-1] == 0:
            return {"kills": done, "codes": codes}
        if codes[-1] not in ((2,) if head else (-9,)):
            raise SystemExit(f"exit code {codes[-1]}, see {out}.log")


def main() -> None:
    """Kill, wait for the end, compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["worker", "run", "head"])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/ray-kills"))
    given = parser.parse_args()
    draw = random.Random(given.seed)
    base = given.out.resolve()
    base.mkdir(parents=True, exist_ok=True)
    local, out = base / f"local-{given.steps}", base / given.kind
    if not (local / "summary.json").is_file() and start(local, given.steps, "--overwrite").wait():
        raise SystemExit(f"see {local}.log")
    started = time.monotonic()
    if given.kind == "worker":
        found = kill_workers(out, given.steps, given.kills, draw)
    else:
        found = kill_again_and_again(out, given.steps, given.kills, draw, head=given.kind == "head")
    events = Counter(str(e["event"]) for e in read_events(out))
    ours, theirs = (json.loads((p / "summary.json").read_text()) for p in (out, local))
    weights = [p.read_bytes() for p in (out / "model/model.safetensors", local / "model/model.safetensors")]
    result = {
        "kind": given.kind,
        **found,
        "seconds": round(time.monotonic() - started, 1),
        "metrics_identical": rows(out) == rows(local),
        "weights_identical": weights[0] == weights[1],
        "store_good": verify_store(FilesystemStore(out / "refit")).good,
        "store_version": ours["weight_version"] == theirs["weight_version"],
        "events": dict(events),
        "reissued_samples": sum(e["samples"] for e in read_events(out) if e["event"] == "reissued"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
