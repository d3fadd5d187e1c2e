"""Learner and rollout worker on two hosts: network namespaces of this machine, joined by a throttled link.

    python bench/two_hosts.py [--mbit 20] [--steps 6] [--out runs/two-hosts]

Each host has its own addresses, its own shared memory and its own /tmp/ray; the worker's sees nothing of the run's folder. A Ray
node runs on each, the worker asks for a resource that only the far one has, and reads new weights over HTTP from the run. The
metrics have to equal those of the same run in one process. Prints one JSON object. Needs root, ip and tc.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
LEARNER, WORKER = "10.86.13.1", "10.86.13.2"
PORT = 6390
TOKEN = secrets.token_hex(32)


def possible() -> str:
    """Why it cannot be done here, or nothing."""
    if os.geteuid() != 0:
        return "not root"
    missing = [name for name in ("ip", "tc", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}"
    name = f"hb-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "no network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


def sh(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@contextmanager
def linked(mbit: float) -> Iterator[tuple[str, str]]:
    """Two namespaces, and a link of ``mbit`` each way between them."""
    tag = os.getpid()
    names = (f"hb-l-{tag}", f"hb-w-{tag}")
    try:
        for name in names:
            sh("ip", "netns", "add", name)
            sh("ip", "-n", name, "link", "set", "lo", "up")
        sh("ip", "link", "add", "link0", "netns", names[0], "type", "veth", "peer", "name", "link0", "netns", names[1])
        for name, address in zip(names, (LEARNER, WORKER)):
            sh("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "link0")
            sh("ip", "-n", name, "link", "set", "link0", "up")
            shape = ["rate", f"{mbit}mbit", "burst", "32kbit", "latency", "400ms"]
            sh("tc", "-n", name, "qdisc", "add", "dev", "link0", "root", "tbf", *shape)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def on(host: str, words: Sequence[str], hidden: Path | None = None) -> list[str]:
    """The command line that runs ``words`` on a host, with shared memory and Ray's folder of its own."""
    Path("/tmp/ray").mkdir(exist_ok=True)
    mounts = ["mount -t tmpfs tmpfs /dev/shm", "mount -t tmpfs tmpfs /tmp/ray"]
    mounts += [f"mount -t tmpfs tmpfs {hidden}"] if hidden else []
    script = " && ".join([*mounts, 'exec "$@"'])
    return ["ip", "netns", "exec", host, "unshare", "--mount", "sh", "-c", script, "sh", *words]


def carried(host: str) -> dict[str, int]:
    """Bytes that went through a host's end of the link."""
    found = json.loads(sh("ip", "-n", host, "-s", "-j", "link", "show", "link0"))[0]["stats64"]
    return {"in": found["rx"]["bytes"], "out": found["tx"]["bytes"]}


@contextmanager
def shell(host: str, hidden: Path | None) -> Iterator[list[str]]:
    """A mount namespace on a host that lasts: the words that enter it."""
    keeper = subprocess.Popen(on(host, ["sleep", "infinity"], hidden))
    try:
        time.sleep(1.0)  # the mounts are made
        yield ["nsenter", "--target", str(keeper.pid), "--mount", "--net"]
    finally:
        keeper.kill()
        keeper.wait()


@contextmanager
def ray_node(enter: Sequence[str], *words: str) -> Iterator[None]:
    """``ray start`` on a host, until the end of the context."""
    line = [*enter, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *words]
    line += ["--object-store-memory", str(200 * 2**20), "--disable-usage-stats"]
    node = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=environment())
    try:
        yield
    finally:
        node.send_signal(signal.SIGTERM)
        try:
            node.wait(30)
        except subprocess.TimeoutExpired:
            node.kill()


def environment() -> dict[str, str]:
    ray = {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    return {**os.environ, **ray, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


def train(out: Path, steps: int, more: Sequence[str], enter: Sequence[str] = ()) -> float:
    """A run of the shipped policy; its seconds."""
    line = [*enter, sys.executable, "-m", "halfbyte", "train", "--out", str(out), "--steps", str(steps), "--overwrite"]
    sets = {"rollout.prompts_per_step": 16, "eval.prompts": 32, "train.checkpoint_every": 0, "alignment.memory_mb": 32}
    for key, value in sets.items():
        line += ["--set", f"{key}={value}"]
    started = time.monotonic()
    done = subprocess.run(
        [*line, "--threads", "1", *more], env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}\n{done.stdout}\n{done.stderr}")
    return time.monotonic() - started


def rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


def main() -> None:
    """Run both, compare, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbit", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("runs/two-hosts"))
    given = parser.parse_args()
    reason = possible()
    if reason:
        raise SystemExit(f"not possible here: {reason}")
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    train(out / "one-process", given.steps, ())
    hidden = out / "hosts"
    hidden.mkdir(exist_ok=True)
    with ExitStack() as stack:
        near, far = stack.enter_context(linked(given.mbit))
        here = stack.enter_context(shell(near, None))
        there = stack.enter_context(shell(far, hidden))
        head = [
            "--head",
            "--port",
            str(PORT),
            "--node-ip-address",
            LEARNER,
            "--num-cpus",
            "1",
            "--include-dashboard=false",
        ]
        stack.enter_context(ray_node(here, *head))
        wait_for_head(here)
        node = ["--address", f"{LEARNER}:{PORT}", "--node-ip-address", WORKER, "--num-cpus", "2"]
        stack.enter_context(ray_node(there, *node, "--resources", '{"far": 2}'))
        before = carried(near)
        more = ["--ray-address", f"{LEARNER}:{PORT}", "--set", "rollout.resources.far=1", "--set", "rollout.workers=1"]
        seconds = train(hidden / "run", given.steps, more, here)
        after = carried(near)
    events = [json.loads(line) for line in (hidden / "run" / "workers.jsonl").read_text().splitlines()]
    closed = next(e for e in events if e["event"] == "closed")
    steps = [json.loads(line) for line in (hidden / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in steps if row["kind"] == "train"]
    result = {
        "mbit": given.mbit,
        "identical": rows(out / "one-process") == rows(hidden / "run"),
        "steps": len(trained),
        "refits": closed["refits"],
        "refit_bytes": closed["fetched_bytes"],
        "first_version_bytes": trained[0]["refit/full_bytes"],
        "refit_seconds": closed["refit_seconds"],
        "link_bytes_to_worker": after["out"] - before["out"],
        "link_bytes_to_learner": after["in"] - before["in"],
        "step_seconds": [round(row["time/step"], 3) for row in trained],
        "run_seconds": round(seconds, 1),
    }
    print(json.dumps(result))


def wait_for_head(enter: Sequence[str]) -> None:
    """Until the port of the head is open."""
    probe = f"import socket; socket.create_connection(('{LEARNER}', {PORT}), 1)"
    end = time.monotonic() + 120
    while subprocess.run([*enter, sys.executable, "-c", probe], capture_output=True, check=False).returncode:
        if time.monotonic() > end:
            raise SystemExit("the head does not start")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
