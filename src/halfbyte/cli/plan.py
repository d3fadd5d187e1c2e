"""``halfbyte plan``: what a run will take before it is run."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from halfbyte.cli.parameter import flag

if TYPE_CHECKING:
    from halfbyte.planning.run_plan import RunPlan, Workload

__all__ = ["plan"]


def plan(
    model: Annotated[str, Parameter(help="config.json, a model folder, or tiny for the policy in the package.")],
    /,
    *,
    workers: Annotated[int, Parameter(help="Rollout engines, each with all weights.")] = 1,
    devices: Annotated[int, Parameter(help="Devices that one engine is spread over.")] = 1,
    learner_devices: Annotated[int, Parameter(help="Devices that the learner is spread over.")] = 1,
    memory: Annotated[float | None, Parameter(help="GiB of one device, for the KV capacity.")] = None,
    reserve: Annotated[float, Parameter(help="Share of that left to all but weights and KV.")] = 0.1,
    link: Annotated[
        float, Parameter(help="MB a second of the narrowest link from the learner to the workers.")
    ] = 1000.0,
    copies: Annotated[int, Parameter(help="How often a refit crosses it: once with a store on the far side.")] = 1,
    encode_threads: Annotated[int, Parameter(help="Threads of the publisher.")] = 1,
    prompts: Annotated[int, Parameter(help="Prompts a step.")] = 64,
    samples: Annotated[int, Parameter(help="Samples a prompt.")] = 8,
    prompt_tokens: Annotated[float, Parameter(help="Mean tokens of a prompt.")] = 16.0,
    response_tokens: Annotated[float | None, Parameter(help="Mean tokens of a response; 16, or the run's.")] = None,
    context: Annotated[int, Parameter(help="Tokens that a sequence may grow to.")] = 4096,
    precision: Annotated[str, Parameter(help="Precision preset of the rollout.")] = "w4a4kv4",
    bits: Annotated[Literal[1, 2, 4], Parameter(help="Guidance bits a number.")] = 1,
    layers: Annotated[str, Parameter(help="Guided layers, as alignment.layers.")] = "all",
    no_guidance: Annotated[bool, flag("Nothing is guided.")] = False,
    change_rate: Annotated[
        float | None, Parameter(help="Share of BF16 weights an update changes; 0.03, or the run's.")
    ] = None,
    profile: Annotated[Literal["fast", "max"], Parameter(help="Codec profile of refits.")] = "fast",
    run: Annotated[Path | None, Parameter(help="Run folder whose measured rates and change rate are taken.")] = None,
    rollout_rate: Annotated[float | None, Parameter(help="Generated tokens a second of one worker.")] = None,
    learner_rate: Annotated[
        float | None, Parameter(help="Generated tokens a second that the learner trains on.")
    ] = None,
    json: Annotated[bool, flag("Print one JSON object.")] = False,
) -> int:
    """Memory by precision, KV capacity, guidance and refit bytes, and the rollout's share of a step, before a run."""
    from halfbyte.models.open_model import model_folder
    from halfbyte.planning.footprint import open_architecture
    from halfbyte.planning.measured import measured
    from halfbyte.planning.run_plan import Fleet, Workload, plan_run

    seen = None if run is None else measured(run)
    if seen is not None:
        rollout_rate = seen.rollout_rate if rollout_rate is None else rollout_rate
        learner_rate = seen.learner_rate if learner_rate is None else learner_rate
        change_rate = seen.change_rate if change_rate is None else change_rate
        response_tokens = seen.response_tokens if response_tokens is None else response_tokens
    work = Workload(
        prompts=prompts,
        samples=samples,
        prompt_tokens=prompt_tokens,
        response_tokens=16.0 if response_tokens is None else response_tokens,
        context=context,
        precision=precision,
        bits=bits,
        sites=() if no_guidance else Workload.sites,
        layers=layers,
        change_rate=0.03 if change_rate is None else change_rate,
        profile=profile,
        rollout_rate=rollout_rate,
        learner_rate=learner_rate,
    )
    fleet = Fleet(
        workers=workers,
        devices=devices,
        learner_devices=learner_devices,
        memory=None if memory is None else memory * 2**30,
        reserve=reserve,
        link=link * 1e6,
        copies=copies,
        encode_threads=encode_threads,
    )
    found = plan_run(open_architecture(model_folder(model)), fleet, work)
    if json:
        print(json_text.dumps(found.to_json(), indent=2))
    else:
        print("\n".join(_text(found, work)))
    return 0


def _text(found: RunPlan, work: Workload) -> Iterator[str]:
    yield f"{found.family}, {_count(found.parameters)} parameters, {_count(found.active_parameters)} active a token"
    yield ""
    yield f"{'engine':<18}{'weights':>12}{'KV a token':>12}{'KV tokens':>14}{f'x {work.context:,}':>12}"
    for row in found.precisions:
        per_token = "-" if row.kv_bytes_per_token is None else _size(row.kv_bytes_per_token)
        held = "-" if row.kv_tokens is None else f"{row.kv_tokens:,}" if row.kv_tokens else "does not fit"
        sequences = "-" if row.sequences is None else f"{row.sequences:,}"
        mark = " <-" if row.precision == work.precision else ""
        yield f"{row.precision:<18}{_size(row.weight_bytes):>12}{per_token:>12}{held:>14}{sequences:>12}{mark}"
    yield ""
    yield (
        f"learner     {_size(found.learner_bytes)} ({_size(found.learner_bytes_per_device)} a device), activations "
        f"{_size(found.activation_bytes_per_token)} a token ({_size(found.activation_bytes_per_token_checkpointed)} "
        "with checkpointing)"
    )
    yield f"step        {found.tokens:,.0f} tokens, {found.response_tokens:,.0f} of them generated"
    yield (
        f"guidance    {_size(found.guidance_bytes_per_token)} a token (formula {_size(found.guidance_formula)}; "
        f"{_size(found.guidance_recorded)} beyond the KV pages), {_size(found.guidance_bytes)} a step"
    )
    refit = found.refit
    yield (
        f"refit       {_size(refit.delta_bytes)} in {refit.delta_total:,.2f} s; all weights: {_size(refit.full_bytes)} in "
        f"{refit.full_total:,.2f} s ({refit.compared})"
    )
    yield "            " + ", ".join(f"{name} {seconds:,.2f}" for name, seconds in refit.delta_seconds.items())
    if found.step_seconds is not None and found.rollout_share is not None:
        yield (
            f"step time   {found.step_seconds:,.2f} s: rollout {found.rollout_seconds:,.2f} ({found.rollout_share:.0%}), learner "
            f"{found.learner_seconds:,.2f}, refit {refit.delta_total:,.2f}"
        )
    yield ""
    yield "assumed:"
    for line in found.assumptions:
        yield f"- {line}"


def _count(n: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:,.0f}"


def _size(n: float) -> str:
    for power, unit in ((5, "PiB"), (4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if n >= 1024**power:
            return f"{n / 1024**power:.4g} {unit}"
    return f"{n:.4g} B"
