"""``halfbyte bench``: kernels and decoding beside baselines, what guidance leaves of the gap, what finds planted damage."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from halfbyte.cli import threads as thread_policy
from halfbyte.cli.bench_serve import serve
from halfbyte.cli.parameter import flag
from halfbyte.errors import ConfigError

__all__ = ["make_bench"]


def make_bench() -> App:
    """The commands."""
    help_text = "Measure kernels, decoding, alignment and diagnosis beside their baselines."
    app = App(name="bench", help=help_text, help_format="plaintext")
    for command in (kernels, rollout, serve, trace, triage, injection):
        app.command(command)
    return app


def kernels(
    *,
    only: Annotated[
        str,
        Parameter(help="Some of linear, w4a16, bf16, experts, attention, quantise, dequantise, guidance, with commas."),
    ] = "",
    quick: Annotated[bool, flag("Fewer and smaller shapes: seconds instead of minutes.")] = False,
    repeats: Annotated[int | None, Parameter(help="Rounds; 15 by default, 5 with --quick.")] = None,
    threads: Annotated[int | None, Parameter(help="Threads; all usable cores by default.")] = None,
    json: Annotated[Path | None, Parameter(help="Also write the rows to this file.")] = None,
) -> int:
    """Time the FP4 kernels beside torch's BF16, our own BF16 and other libraries, and check every result."""
    thread_policy.apply(threads)

    from halfbyte.bench import kernels as bench
    from halfbyte.bench import table
    from halfbyte.bench.libraries import find_libraries
    from halfbyte.bench.machine import machine
    from halfbyte.kernels import active

    groups = bench.choose(only)
    converts = bool({"quantise", "dequantise"} & set(groups))
    libraries, absent = find_libraries() if converts else ([], [])
    make = bench.quick_plan if quick else bench.full_plan
    plan = make(libraries) if repeats is None else make(libraries, _positive(repeats, "--repeats"))
    facts, rows = machine(), []
    try:
        for row in bench.run(active(), plan, groups):
            _progress(f"{row.kernel} n={row.n} k={row.k} m={row.m}: {row.ratio:.2f} x {row.baseline}")
            rows.append(row)
    finally:  # Ctrl-C after minutes: what there is so far
        table.show([table.heading(facts), table.kernel_table(rows), *absent])
    if json is not None:
        table.write_json(json, facts, [row.to_json() for row in rows], absent=absent)
    return 0


def rollout(
    *,
    model: Annotated[str, Parameter(help="Model folder, or tiny for the policy in the package.")] = "tiny",
    random_moe: Annotated[
        bool, flag("Instead: a mixture of 64 experts with 1B random weights, made in memory.")
    ] = False,
    precision: Annotated[str, Parameter(help="Precision presets, with commas.")] = "bf16,w4a4kv4,w4a4kv4-head,w4a16",
    batch: Annotated[str, Parameter(help="Sequences decoded together, with commas.")] = "1,16",
    prompt: Annotated[int, Parameter(help="Prompt tokens, not timed.")] = 16,
    tokens: Annotated[int, Parameter(help="New tokens of each sequence.")] = 64,
    repeats: Annotated[int, Parameter(help="Rounds.")] = 5,
    threads: Annotated[int | None, Parameter(help="Threads; all usable cores by default.")] = None,
    json: Annotated[Path | None, Parameter(help="Also write the rows to this file.")] = None,
) -> int:
    """Decode with our engine at several precisions and with transformers in BF16, in turns; count resident weights."""
    thread_policy.apply(threads)

    from halfbyte.bench import rollout as bench
    from halfbyte.bench import table
    from halfbyte.bench.machine import machine
    from halfbyte.models.architecture import Architecture
    from halfbyte.models.precision import Precision
    from halfbyte.planning.footprint import weight_bytes

    def predict(architecture: Architecture, at: Precision) -> int:
        return sum(weight_bytes(architecture, at)[0].values())

    batches = bench.numbers(batch, "--batch")
    for value, name in ((prompt, "--prompt"), (tokens, "--tokens"), (repeats, "--repeats")):
        _positive(value, name)
    length = prompt + tokens
    facts, rows = machine(), []
    if random_moe:
        contest = bench.open_random_moe(predict, batch=max(batches), length=length)
    else:
        presets = [name.strip() for name in precision.split(",")]
        contest = bench.open_contest(model, presets, predict, batch=max(batches), length=length)
    try:
        for row in bench.race(contest, batches, prompt_tokens=prompt, new_tokens=tokens, repeats=repeats):
            _progress(f"{row.precision} batch {row.batch}: {row.ratio:.2f} x {row.baseline}")
            rows.append(row)
    finally:
        tables = table.rollout_table(rows), table.memory_table(contest.memory)
        table.show([table.heading(facts), *tables, *contest.notes])
    if json is not None:
        memory = [row.to_json() for row in contest.memory]
        table.write_json(json, facts, [row.to_json() for row in rows], memory=memory, notes=list(contest.notes))
    return 0


def trace(
    *,
    model: Annotated[str, Parameter(help="Model folder, or tiny for the policy in the package.")] = "tiny",
    random_moe: Annotated[int, Parameter(help="Instead: a random mixture of experts with this many layers.")] = 0,
    precision: Annotated[str, Parameter(help="Precision presets, with commas.")] = "experts-w4a4kv4,w4a4kv4",
    products: Annotated[str, Parameter(help="What the learner multiplies in: bf16, fp32, or both.")] = "bf16,fp32",
    env: Annotated[str, Parameter(help="Environment that the prompts come from.")] = "arithmetic:sort",
    prompts: Annotated[int, Parameter(help="Prompts.")] = 32,
    samples: Annotated[int, Parameter(help="Responses to each.")] = 4,
    tokens: Annotated[int, Parameter(help="Tokens of a response.")] = 32,
    full: Annotated[bool, flag("Every method with every payload, set of sites and layer policy.")] = False,
    repeats: Annotated[int, Parameter(help="Steps a row; the fastest counts.")] = 1,
    threads: Annotated[int | None, Parameter(help="Threads; all usable cores by default.")] = None,
    json: Annotated[Path | None, Parameter(help="Also write the rows to this file.")] = None,
) -> int:
    """Measure what rollout-guided rounding leaves of the gap, by method, payload, sites and layers, with controls."""
    thread_policy.apply(threads)

    from halfbyte.bench import table
    from halfbyte.bench import trace as bench
    from halfbyte.bench.machine import machine
    from halfbyte.bench.trace_sizes import size_rows

    named = ((prompts, "--prompts"), (samples, "--samples"), (tokens, "--tokens"), (repeats, "--repeats"))
    for value, name in named:
        _positive(value, name)
    chosen = [word.strip() for word in products.split(",")]
    if not chosen or set(chosen) - {"bf16", "fp32"}:
        raise ConfigError(
            f"{products!r} cannot be used", where="--products", expected="bf16, fp32, or both with a comma"
        )
    facts, rows = machine(), []
    sizes = list(size_rows())
    shape = {"prompts": prompts, "samples": samples, "tokens": tokens}
    try:
        for preset in precision.split(","):
            if random_moe:
                trial = bench.random_trial(preset.strip(), layers=random_moe, **shape)
            else:
                trial = bench.open_trial(model, preset.strip(), env=env, **shape)
            runs = bench.full_runs(trial) if full else bench.short_runs(trial)
            for word in chosen:
                for row in bench.compare(trial, runs, word, repeats=repeats):
                    _progress(f"{row.precision} {row.products} {row.method} {row.sites}: k3 {row.k3_kl:.2e}")
                    rows.append(row)
    finally:
        table.show([table.heading(facts), table.trace_table(rows), table.size_table(sizes)])
    if json is not None:
        table.write_json(json, facts, [row.to_json() for row in rows], sizes=sizes)
    return 0


def triage(
    *,
    batches: Annotated[int, Parameter(help="Batches of each scenario.")] = 20,
    budget: Annotated[float, Parameter(help="Largest share of the tokens that TRIAGE may select.")] = 1.0,
    json: Annotated[Path | None, Parameter(help="Also write the rows to this file.")] = None,
) -> int:
    """Plant clusters of damaged tokens and compare what finds them: segmenters, gates, tokens, sequences, sizes."""
    thread_policy.apply(None)

    from halfbyte.bench import table
    from halfbyte.bench import triage as bench
    from halfbyte.bench.machine import machine
    from halfbyte.bench.planted import SCENARIOS

    _positive(batches, "--batches")
    facts, timed = machine(), list(bench.speed())
    rows: list[bench.SelectionRow] = []
    try:
        for scenario in SCENARIOS:
            rows += bench.detect(scenario, batches, q_max=budget)
            rows += bench.rank(scenario, batches)
            _progress(scenario.name)
    finally:
        groups = {
            "TRIAGE's own selection: F1 (precision, recall); without damage, batches touched": ("detect", "default"),
            "the same without the direction test": ("detect", "without direction test"),
            "as many tokens as are damaged, highest score first: F1": ("rank", ""),
        }
        parts = [
            table.selection_table([row for row in rows if (row.mode, row.gates) == key], title)
            for title, key in groups.items()
        ]
        table.show([*parts, table.speed_table(timed)])
    if json is not None:
        table.write_json(json, facts, [row.to_json() for row in rows], speed=[row.to_json() for row in timed])
    return 0


def injection(
    *,
    out: Annotated[Path, Parameter(help="JSON lines, one a finished run; called again, only missing runs are done.")],
    quadrants: Annotated[
        str, Parameter(help="Signs of advantage and gap, with commas.")
    ] = "neg_neg,pos_neg,pos_pos,neg_pos",
    corrections: Annotated[str, Parameter(help="Corrections, with commas.")] = "none,token_tis,opsm,triage",
    seeds: Annotated[int, Parameter(help="Seeds 0, 1, ... of each kind of run.")] = 3,
    steps: Annotated[int | None, Parameter(help="Training steps of a run; 60 by default.")] = None,
    scale: Annotated[float | None, Parameter(help="Mean size of the injected gap, nats; 1.5 by default.")] = None,
    share: Annotated[float | None, Parameter(help="Share of the blocks of 4 tokens that are damaged; 0.7.")] = None,
    tail: Annotated[str | None, Parameter(help="constant, exponential (the default) or heavy.")] = None,
    threads: Annotated[int | None, Parameter(help="Threads; all usable cores by default.")] = None,
) -> int:
    """Put a gap into one quadrant of an exact run: which mismatch harms learning, and what corrections recover."""
    thread_policy.apply(threads)

    from halfbyte.bench import injection as bench
    from halfbyte.bench import table
    from halfbyte.bench.injection_table import injection_tables

    chosen = {"steps": steps, "scale": scale, "share": share, "tail": tail}
    study = bench.Study(**{key: value for key, value in chosen.items() if value is not None})  # type: ignore[arg-type]
    names = [[name.strip() for name in text.split(",") if name.strip()] for text in (quadrants, corrections)]
    cells = bench.plan(names[0], names[1], range(_positive(seeds, "--seeds")))
    try:
        bench.run(study, cells, out, _progress)
    finally:
        table.show(injection_tables(bench.read(out, study)))
    return 0


def _positive(value: int, name: str) -> int:
    if value < 1:
        raise ConfigError(f"{name} is {value}", where=name, expected="a positive integer")
    return value


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
