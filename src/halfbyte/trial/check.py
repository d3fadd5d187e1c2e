"""The preflight that needs no server: artefacts, licences, model support, format against hardware, memory, scorers, overlap."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from halfbyte.errors import CheckpointError, UserError
from halfbyte.trial.artefact import Artefact, artefact_folder, inspect_artefact, licence_of
from halfbyte.trial.folder import TrialFolder
from halfbyte.trial.hardware import Machine, weights_run
from halfbyte.trial.integrity import Finding
from halfbyte.trial.overlap import find_overlap, tuning_texts
from halfbyte.trial.records import ARMS, Arm
from halfbyte.trial.scorers import Response, make_scorers, score
from halfbyte.trial.settings import Target

__all__ = ["static_findings"]

_SHOWN = 3
_GIB = 1 << 30
#: A server takes more than weights and KV pool: the program itself, activations, the tokeniser.
_OVERHEAD = 512 << 20


def static_findings(folder: TrialFolder, machine: Machine) -> list[Finding]:
    """What can be said before a server runs."""
    findings = [*_tasks(folder)]
    seen: dict[Arm, Artefact] = {}
    for arm in ARMS:
        target = folder.settings.target(arm)
        artefact, found = _artefact(folder, arm, target)
        findings += found
        findings.append(_licence(folder, arm, target))
        if artefact is not None:
            seen[arm] = artefact
            findings += _support(arm, target, artefact, machine)
    findings += _memory(folder, seen, machine)
    findings += _claim(folder)
    findings.append(_overlap(folder, seen))
    if folder.settings.baseline == folder.settings.candidate:
        findings.append(Finding("preflight", "arms", None, "baseline and candidate are the same target: an A/A trial"))
    return findings


def _engine(target: Target) -> str:
    """The program that a target starts; "" for a URL."""
    return Path(target.serve[0]).name if target.serve else ""


def _tasks(folder: TrialFolder) -> Iterator[Finding]:
    """Scorers can be made, and pass the expected outcome itself where that is a text."""
    try:
        scorers = make_scorers(folder.tasks, folder.path)
    except UserError as error:
        yield Finding("preflight", "scorers", False, str(error).replace("\n", ";"))
        return
    plain = [t for t in folder.tasks if t.scorer.type in ("exact", "contains", "numeric", "math_verify")]
    wrong = []
    for task in plain:
        text = "\n".join(task.expected) if isinstance(task.expected, list) else str(task.expected)
        if score(scorers[task.id], Response(text)).passed is not True:
            wrong.append(task.id)
    if wrong:
        detail = f"scorers fail the expected outcome itself: {', '.join(wrong[:_SHOWN])}"
        yield Finding("preflight", "scorers", False, detail, "mend expected or scorer of these tasks")
    else:
        yield Finding(
            "preflight", "scorers", True, f"{len(folder.tasks)} tasks; scorers pass their own expected outcomes"
        )
    if folder.settings.run.api == "completions":
        chats = [task.id for task in folder.tasks if task.prompt is None or task.tools is not None]
        if chats:
            detail = f"run.api = completions sends plain prompts, and tasks have messages or tools: {', '.join(chats[:_SHOWN])}"
            yield Finding("preflight", "api", False, detail)
    if not any(task.critical for task in folder.tasks):
        yield Finding("preflight", "critical tasks", None, "no task is marked critical")


def _artefact(folder: TrialFolder, arm: Arm, target: Target) -> tuple[Artefact | None, list[Finding]]:
    name = f"{arm}: artefact"
    path = artefact_folder(folder, target)
    if path is None:
        if target.started:
            fix = f"set {arm}.artefact to the model's folder"
            return None, [Finding("preflight", name, False, "not named, so nothing about it can be checked", fix)]
        return None, [Finding("preflight", name, None, "on another machine: not checked")]
    try:
        artefact = inspect_artefact(path)
    except (CheckpointError, OSError) as error:
        fix = f"download or make it, or mend {arm}.artefact"
        return None, [Finding("preflight", name, False, str(error).replace("\n ", ";"), fix)]
    detail = f"{path.name}: {artefact.format}, {artefact.weights_bytes / _GIB:.2f} GiB of weights"
    return artefact, [Finding("preflight", name, True, detail)]


def _licence(folder: TrialFolder, arm: Arm, target: Target) -> Finding:
    name = f"{arm}: licence"
    path = artefact_folder(folder, target)
    if target.licence is not None:
        file: Path | None = folder.path / target.licence
    elif path is None:
        return Finding("preflight", name, None, "the model is on another machine: not checked")
    else:
        file = licence_of(path)
    if file is None or not file.is_file() or not file.read_bytes().strip():
        detail = f"no licence file {'in the model folder' if file is None else file}"
        fix = f"put the model's licence there, or name the file in {arm}.licence"
        return Finding("preflight", name, False, detail, fix)
    first = next(
        (line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()), ""
    )
    return Finding("preflight", name, True, f"{file.name}: {first[:80]}")


def _support(arm: Arm, target: Target, artefact: Artefact, machine: Machine) -> Iterator[Finding]:
    """Architecture and format, in the engine that is to serve them."""
    if not target.started:
        return
    engine = _engine(target)
    name, families = f"{arm}: architecture", ", ".join(artefact.architectures) or "unnamed"
    if engine == "halfbyte":
        from halfbyte.models import load_checkpoint

        try:
            family = load_checkpoint(artefact.folder, finite=False).architecture.family
            yield Finding("preflight", name, True, f"{families}: {family} of halfbyte")
        except UserError as error:
            yield Finding("preflight", name, False, str(error).replace("\n ", ";"))
        yield from _preset(arm, target)
    else:
        yield Finding("preflight", name, None, f"{families}: {engine} will say when it starts")
    ok, detail = weights_run(artefact.format, engine, machine)
    yield Finding("preflight", f"{arm}: format", ok, detail)


def _preset(arm: Arm, target: Target) -> Iterator[Finding]:
    """What halfbyte serve is told to run in, against what [arm] precision says."""
    from halfbyte.models.precision import PRESETS

    parts = list(target.serve or ())
    told = next((parts[i + 1] for i in range(len(parts) - 1) if parts[i] == "--precision"), None)
    told = next((part.partition("=")[2] for part in parts if part.startswith("--precision=")), told)
    name = f"{arm}: precision"
    if told is not None and told not in PRESETS:
        yield Finding("preflight", name, False, f"{told} is no preset of halfbyte", f"one of {', '.join(PRESETS)}")
    elif told is not None and target.precision in PRESETS and told != target.precision:
        detail = f"{arm}.precision says {target.precision}, the command {told}"
        yield Finding("preflight", name, False, detail, "make them agree: the report repeats the first")


def _memory(folder: TrialFolder, seen: dict[Arm, Artefact], machine: Machine) -> Iterator[Finding]:
    """Weights as stored and KV pool, of the servers that are up at once, against what is free."""
    needs: dict[Arm, int] = {}
    for arm, artefact in seen.items():
        target = folder.settings.target(arm)
        if target.started:
            needs[arm] = artefact.weights_bytes + int((target.kv_memory_mb or 0) * (1 << 20)) + _OVERHEAD
    if not needs:
        return
    engines = {_engine(folder.settings.target(arm)) for arm in needs}
    free = machine.memory_bytes if engines == {"halfbyte"} or machine.gpu is None else machine.gpu_memory_bytes
    shown = ", ".join(f"{arm} {need / _GIB:.2f} GiB" for arm, need in needs.items())
    if free is None:
        yield Finding("memory", "fit in memory", None, f"{shown}; how much is free is not known")
        return
    detail = f"{shown}; {free / _GIB:.2f} GiB free"
    if max(needs.values()) > free:
        yield Finding(
            "memory", "fit in memory", False, detail, "a larger machine, a smaller KV pool, or a smaller model"
        )
    elif sum(needs.values()) > free and not folder.settings.run.exclusive:
        yield Finding("memory", "fit in memory", False, f"{detail}: not both at once", "set run.exclusive = true")
    else:
        yield Finding("memory", "fit in memory", True, detail)
    unset = [arm for arm in needs if folder.settings.target(arm).kv_memory_mb is None]
    if folder.settings.limits.benefit == "peak_memory" and unset:
        detail = f"the KV pool of {' and '.join(unset)} is not pinned, and a pool is part of the peak"
        fix = "set kv_memory_mb in both targets to hold the same tokens, and pass {kv_memory_mb} to serve"
        yield Finding("memory", "KV pools", False, detail, fix)


def _claim(folder: TrialFolder) -> Iterator[Finding]:
    """A lower peak is claimed only where somebody can look."""
    if folder.settings.limits.benefit != "peak_memory":
        return
    remote = [arm for arm in ARMS if not folder.settings.target(arm).started]
    if remote:
        detail = (
            f"limits.benefit = peak_memory, and the memory of {' and '.join(remote)} cannot be seen: a URL claims none"
        )
        fix = "let the trial start both servers (serve), or choose another benefit"
        yield Finding("memory", "memory claim", False, detail, fix)
    else:
        yield Finding("memory", "memory claim", True, "the trial starts both servers and can look into them")


def _overlap(folder: TrialFolder, seen: dict[Arm, Artefact]) -> Finding:
    name, files = "overlap with tuning data", folder.tuning_files()
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        return Finding("overlap", name, False, f"tuning data is not there: {', '.join(missing)}", "mend data.tuning")
    hashes = {hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    for arm, artefact in seen.items():
        digest = artefact.calibration_sha256
        if digest is not None and digest not in hashes:
            detail = f"the {arm} was calibrated on a text that data.tuning does not name (SHA-256 {digest[:12]}...)"
            return Finding("overlap", name, False, detail, "add that file to data.tuning")
    if not files:
        return Finding("overlap", name, None, "data.tuning names no file: nothing to compare with")
    found = find_overlap(folder.tasks, tuning_texts(files), folder.settings.data.ngram)
    if found:
        shown = "; ".join(f"{o.task} ({o.kind}, {o.where}: {o.shown[:60]!r})" for o in found[:_SHOWN])
        detail = f"{len(found)} of {len(folder.tasks)} tasks were seen in tuning: {shown}"
        return Finding("overlap", name, False, detail, "take other tasks, or tune again without these texts")
    return Finding(
        "overlap", name, True, f"no task in {len(files)} files, by exact text and {folder.settings.data.ngram}-gram"
    )
