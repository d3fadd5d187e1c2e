"""What waiting OpenMP threads cost: small torch training steps under several waiting policies, alone and in pairs.

    python bench/threads.py [--steps 4] [--repeats 3] [--json FILE]

Each arm runs one or two processes at once, arms interleaved; the table has the seconds of the slowest process, smallest
and median over the repeats. ``halfbyte`` is the policy of ``halfbyte.cli.threads``. What else runs shows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from halfbyte.cli import threads

ARMS: dict[str, dict[str, str]] = {
    "default": {},
    "short spin": {"GOMP_SPINCOUNT": "1000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def work(steps: int) -> float:
    """Seconds of ``steps`` steps of a two-layer transformer: 16 small forward passes, one training step each."""
    import time

    import torch
    from torch import nn

    torch.manual_seed(0)
    width = 128
    layers = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(2)
    ]
    embed, model, head = nn.Embedding(64, width), nn.Sequential(*layers), nn.Linear(width, 64)
    parameters = [*embed.parameters(), *model.parameters(), *head.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=1e-3)

    def step() -> None:
        with torch.no_grad():
            for _ in range(16):
                head(model(embed(torch.randint(0, 64, (64, 8))))[:, -1]).softmax(-1).multinomial(1)
        ids = torch.randint(0, 64, (64, 32))
        loss = nn.functional.cross_entropy(head(model(embed(ids))).flatten(0, 1), ids.flatten())
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - start


def measure(environment: dict[str, str], processes: int, steps: int) -> float:
    """Seconds of the slowest of ``processes`` running at once."""
    command = [sys.executable, __file__, "--steps", str(steps), "--worker"]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return max(float(process.communicate()[0]) for process in running)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(work(options.steps))
        return
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_", "HALFBYTE_THREADS"))}
    ours: dict[str, str] = {}
    threads.apply(None, ours)
    arms = {**ARMS, "halfbyte": ours}
    seconds: dict[tuple[str, int], list[float]] = {(arm, n): [] for arm in arms for n in (1, 2)}
    for _ in range(options.repeats):
        for (arm, n), found in seconds.items():
            found.append(measure(clean | arms[arm], n, options.steps))
    print(f"{'policy':<12}{'processes':>10}{'smallest':>10}{'median':>10}   seconds for {options.steps} steps")
    rows = []
    for (arm, n), found in seconds.items():
        rows.append({"policy": arm, "processes": n, "seconds": found, "environment": arms[arm]})
        print(f"{arm:<12}{n:>10}{min(found):>10.2f}{statistics.median(found):>10.2f}")
    if options.json:
        options.json.write_text(
            json.dumps({"steps": options.steps, "cores": threads.usable_cores(), "rows": rows}, indent=2)
        )


if __name__ == "__main__":
    main()
