"""``halfbyte doctor``: what this machine runs, how, and what a model would cost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from halfbyte.cli.parameter import flag
from halfbyte.errors import ConfigError

__all__ = ["doctor"]


def doctor(
    model: Annotated[
        str | None,
        Parameter(help="Model folder to cost (config.json is enough), or tiny for the policy in the package."),
    ] = None,
    /,
    *,
    context: Annotated[int, Parameter(help="Tokens of KV cache to cost.")] = 4096,
    as_json: Annotated[bool, Parameter("--json"), flag("Print one JSON object.")] = False,
) -> int:
    """Show processor, kernels, versions, threads and precisions; with a model folder, its memory at each precision."""
    if context < 1:
        raise ConfigError(f"--context is {context}", where="command line", expected="at least 1 token")

    from halfbyte.cli import machine
    from halfbyte.models.open_model import model_folder
    from halfbyte.planning.footprint import footprint, open_architecture

    facts: dict[str, Any] = {
        "halfbyte": machine.halfbyte_version(),
        "processor": machine.processor(),
        "threads": machine.threads(),
        "kernels": machine.kernels(),
        "versions": machine.versions(),
        "extras": machine.extras(),
        "precisions": machine.precisions(),
    }
    if model is not None:
        facts["model"] = footprint(open_architecture(model_folder(model)), context)
        facts["model"]["folder"] = model
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(_text(facts)))
    return 0


def _text(facts: Mapping[str, Any]) -> Iterator[str]:
    cpu, threads, kernels = facts["processor"], facts["threads"], facts["kernels"]
    yield f"halfbyte {facts['halfbyte']}"
    yield ""
    yield f"processor    {cpu['name']} ({cpu['machine']})"
    yield f"  cores      {cpu['usable_cores']} usable of {cpu['cores']}"
    yield f"  features   {' '.join(cpu['features']) or 'none of those the kernels look for'}"
    yield f"  memory     {_bytes(cpu['memory_bytes'])}"
    yield f"threads      torch {threads['torch']}" + (f", native pool {threads['native']}" if threads["native"] else "")
    for name, value in threads["environment"].items():
        yield f"  {name}={value}"
    yield f"kernels      {kernels['active']} (available: {', '.join(kernels['available'])})"
    if kernels["requested"]:
        yield f"  asked for  HALFBYTE_KERNELS={kernels['requested']}"
    if kernels["native"]:
        yield f"  native     {' '.join(kernels['native'])}"
    if kernels["reference"]:
        yield f"  reference  {' '.join(kernels['reference'])}"
    yield from _columns([("versions" if i == 0 else "", *item) for i, item in enumerate(facts["versions"].items())], 13)
    for i, (name, extra) in enumerate(facts["extras"].items()):
        state = "installed" if extra["installed"] else f"missing; {extra['install']}"
        yield f"{'extras' if i == 0 else '':<13}{name:<14}{state}"
    yield ""
    header = ("precision", "attention", "mlp", "experts", "head", "router", "kv")
    yield from _columns([header, *[tuple(row[key] for key in ("name", *header[1:])) for row in facts["precisions"]]])
    if "model" in facts:
        yield ""
        yield from _model(facts["model"])


def _model(model: Mapping[str, Any]) -> Iterator[str]:
    yield f"model        {model['folder']}: {model['family']}, {model['parameters'] / 1e6:.1f}M weights"
    yield f"  training   {_bytes(model['learner_bytes'])} for FP32 masters, rounded weights, gradients and two AdamW moments"
    # By bytes, not by parameters: a tied head has no parameters of its own and is packed all the same.
    by_site = [row["weight_bytes_by_site"] for row in model["precisions"]]
    sites = [site for site in by_site[0] if any(row[site] for row in by_site)]
    header = ("precision", "weights", *sites, "kv/token", f"kv {model['context']} tokens", "total")
    rows = [
        (
            row["precision"],
            _bytes(row["weight_bytes"]),
            *[_bytes(row["weight_bytes_by_site"][site]) for site in sites],
            *(["not possible"] * 3 if row["kv_bytes_per_token"] is None else map(_bytes, (
                row["kv_bytes_per_token"], row["kv_bytes"], row["total_bytes"],
            ))),
        )
        for row in model["precisions"]
    ]  # fmt: skip
    yield from _columns([header, *rows])
    for row in model["precisions"]:
        for note in row["notes"]:
            yield f"  {row['precision']}: {note}"


def _columns(rows: Sequence[Sequence[str | None]], *minimum: int) -> Iterator[str]:
    texts = [["-" if cell is None else cell for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) + 2 for i in range(len(texts[0]))]
    widths = [max(width, *minimum[i : i + 1], 0) for i, width in enumerate(widths)]
    for row in texts:
        yield "".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip()


def _bytes(count: int | None) -> str:
    if count is None:
        return "unknown"
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count} B"
