"""``halfbyte refit``: publish versions of weights, follow them, look at a store, and say what a refit costs."""

from __future__ import annotations

import json as json_text
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from halfbyte.cli import threads as thread_policy
from halfbyte.cli.parameter import flag
from halfbyte.errors import ConfigError

if TYPE_CHECKING:
    from halfbyte.refit.manifest import Signer
    from halfbyte.refit.subscriber import Refit

__all__ = ["make_refit"]

StoreFlag = Annotated[str, Parameter(help="Store: a folder, file://, s3://, gs://, az:// or, to read, http(s)://.")]
KeyFlag = Annotated[Path | None, Parameter(help="File with the key that signs manifests; demanded of all when given.")]


def make_refit() -> App:
    """The commands."""
    app = App(
        name="refit", help="Ship only the weights that changed, to any number of readers.", help_format="plaintext"
    )
    for command in (publish, follow, verify, log, gc, bench, plan):
        app.command(command)
    return app


def publish(
    checkpoint: Annotated[Path, Parameter(help="Checkpoint folder with safetensors files.")],
    /,
    *,
    store: StoreFlag,
    run: Annotated[str | None, Parameter(help="Run; by default that of the store, or the folder's name.")] = None,
    version: Annotated[int | None, Parameter(help="Version; by default one more than the last.")] = None,
    profile: Annotated[
        Literal["fast", "max"], Parameter(help="max: about a fifth fewer bytes, several times the time.")
    ] = "fast",
    baseline: Annotated[
        Path | None, Parameter(help="Folder that keeps the last version on disk; in memory by default.")
    ] = None,
    anchor_every: Annotated[int, Parameter(help="A full version at least this often; 0 for never.")] = 64,
    key: KeyFlag = None,
) -> int:
    """Make a checkpoint folder the next version in a store."""
    from halfbyte.refit.errors import LayoutError
    from halfbyte.refit.head import read_head
    from halfbyte.refit.publisher import Publisher, PublishOptions
    from halfbyte.refit.shards import checkpoint_places
    from halfbyte.refit.store import open_store

    if anchor_every < 0:
        raise ConfigError(f"--anchor-every is {anchor_every}", where="--anchor-every", expected="0 or more versions")
    places = checkpoint_places(checkpoint)
    if not places:
        raise LayoutError("no tensors", where=str(checkpoint), expected="a folder with .safetensors files")
    opened = open_store(store)
    found = read_head(opened)
    name = run or (found[0].run if found else checkpoint.resolve().name)
    publisher = Publisher(
        opened,
        name,
        options=PublishOptions(profile=profile, anchor_every=anchor_every),
        baseline=baseline,
        signer=_signer(key),
    )
    done = publisher.publish(
        {n: place.read() for n, place in places.items()},
        version=version,
        infos={n: place.info for n, place in places.items()},
    )
    share = done.changed / max(done.elements, 1)
    print(
        f"{name} version {done.stamp.version}: {done.kind}, {share:.2%} of the elements, {_size(done.bytes)} of "
        f"{_size(done.full_bytes)}, {done.encode_seconds:.2f} s encoding, {done.store_seconds:.2f} s storing"
    )
    if done.upkeep_error:
        print(f"warning: a skip or full version could not be written: {done.upkeep_error}", file=sys.stderr)
    return 0


def follow(
    *,
    store: StoreFlag,
    folder: Annotated[Path, Parameter(help="Folder to keep up to date; FOLDER/current is the version served.")],
    source: Annotated[
        Path | None, Parameter(help="Checkpoint to begin with; by default the first version is fetched whole.")
    ] = None,
    interval: Annotated[float, Parameter(help="Seconds between looks at the store.")] = 1.0,
    once: Annotated[bool, flag("Go to the current version and stop.")] = False,
    keep: Annotated[int, Parameter(help="Versions kept in the folder.")] = 2,
    name: Annotated[str, Parameter(help="This reader's name, unique among the readers of a store.")] = "reader",
    key: KeyFlag = None,
) -> int:
    """Keep a checkpoint folder at the store's current version; every switch is atomic. Ctrl-C stops."""
    from halfbyte.errors import RefitError
    from halfbyte.refit.adapters.folder import FolderTarget
    from halfbyte.refit.leases import check_reader
    from halfbyte.refit.store import open_store
    from halfbyte.refit.subscriber import Subscriber

    if interval <= 0:
        raise ConfigError(f"--interval is {interval}", where="--interval", expected="a positive number of seconds")
    if keep < 1:
        raise ConfigError(f"--keep is {keep}", where="--keep", expected="at least 1 version")
    target = FolderTarget(folder, source=source, keep=keep)
    subscriber = Subscriber(open_store(store), target, name=check_reader(name), signer=_signer(key))
    if once:
        done = subscriber.refit()
        if done is None:
            held = subscriber.held
            print("nothing to do" + (f": version {held.version}" if held else ": the store is empty"))
        else:
            _say(done)
        return 0
    for event in subscriber.follow(interval=interval):
        if isinstance(event, RefitError):
            print(f"warning: {event}", file=sys.stderr, flush=True)
        else:
            _say(event)
    return 0


def verify(
    *,
    store: StoreFlag,
    folder: Annotated[
        Path | None,
        Parameter(help="Also compare a checkpoint folder (or one kept by follow) with the current version."),
    ] = None,
    quick: Annotated[bool, flag("Manifests only, no objects.")] = False,
    key: KeyFlag = None,
) -> int:
    """Fetch and check everything a store lists; exit code 1 where something is wrong."""
    from halfbyte.refit.fetch import Fetcher
    from halfbyte.refit.shards import checkpoint_places
    from halfbyte.refit.store import open_store
    from halfbyte.refit.verify import Checked, differing_tensors, verify_store

    if folder is not None and quick:
        raise ConfigError("--folder needs the objects", where="--quick", fix="leave --quick away")

    def show(way: Checked) -> None:
        if way.problem:
            print(f"{_way(way.edge)}: {way.problem}")

    opened, signer = open_store(store), _signer(key)
    report = verify_store(opened, signer=signer, objects=not quick, on_way=show)
    if report.head is None:
        print(report.problem or "the store is empty")
        return 1 if report.problem else 0
    if report.problem:
        print(report.problem)
    wrong = 0
    if folder is not None and report.state is not None:
        places = checkpoint_places(folder / "current" if (folder / "current").exists() else folder)
        aliases = Fetcher(opened, signer=signer).manifest(report.head.manifest).aliases
        infos = {name: place.info for name, place in places.items()}
        for name, what in differing_tensors(report.state, infos, lambda n: places[n].read(), aliases).items():
            print(f"{folder}: {name}: {what}")
            wrong += 1
    bad = sum(bool(way.problem) for way in report.ways)
    where = "" if report.head.version is None else f" to version {report.head.version}"
    print(
        f"run {report.head.run}: {len(report.ways)} ways{where}, {bad} damaged"
        + (f", {wrong} tensors differ" if folder else "")
    )
    return 0 if report.good and not wrong else 1


def log(
    *,
    store: StoreFlag,
    json: Annotated[bool, flag("Print one JSON object a line.")] = False,
    key: KeyFlag = None,
) -> int:
    """List what a store holds: versions, their kind, size and change rate."""
    from halfbyte.refit.store import open_store
    from halfbyte.refit.verify import verify_store

    report = verify_store(open_store(store), signer=_signer(key), objects=False)
    head = report.head
    if head is None:
        print(report.problem or "the store is empty", file=sys.stderr)
        return 1 if report.problem else 0
    for way in report.ways:
        row: dict[str, Any] = {
            "version": way.edge.version,
            "kind": way.edge.kind,
            "parent": way.edge.parent,
            "bytes": way.edge.bytes,
            "head": way.edge.manifest == head.manifest,
            "problem": way.problem,
        }
        if way.manifest is not None:
            row |= {
                "changed": sum(t.changed for t in way.manifest.tensors),
                "tensors": len(way.manifest.tensors),
                "created": way.manifest.created,
                "statistics": dict(way.manifest.statistics),
            }
        if json:
            print(json_text.dumps(row, sort_keys=True))
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row.get("created", 0.0)))
        changed = f"{row.get('changed', 0):,} elements of {row.get('tensors', 0)} tensors"
        mark = "  <- HEAD" if row["head"] else ""
        print(f"{_way(way.edge):<22} {_size(way.edge.bytes):>10}  {when}  {changed}{mark} {way.problem}".rstrip())
    return 0


def gc(
    *,
    store: StoreFlag,
    keep: Annotated[int, Parameter(help="Versions that readers may be behind without needing a full one.")] = 64,
    grace: Annotated[float, Parameter(help="Seconds between finding something unused and deleting it.")] = 900.0,
) -> int:
    """Forget old versions and delete what no reader can need any more; run it now and then."""
    from halfbyte.refit.retention import Retention, collect
    from halfbyte.refit.store import open_store

    if keep < 1 or grace < 0:
        raise ConfigError(f"--keep {keep} --grace {grace}", expected="at least 1 version and 0 seconds")
    done = collect(open_store(store), Retention(versions=keep, grace=grace))
    readers = f"; kept for {', '.join(done.leases)}" if done.leases else ""
    print(
        f"{done.dropped_steps} ways forgotten, {done.deleted} objects deleted ({_size(done.freed_bytes)}), "
        f"{done.doomed} wait for their grace period{readers}"
    )
    return 0


def bench(
    *,
    run: Annotated[Path | None, Parameter(help="Measure the versions in this run folder or store as well.")] = None,
    profile: Annotated[Literal["fast", "max", "both"], Parameter(help="Profiles of our codec.")] = "both",
    elements: Annotated[int, Parameter(help="Weights of a synthetic trace.")] = 20_000_000,
    quick: Annotated[bool, flag("A million weights and three rounds: seconds.")] = False,
    repeats: Annotated[int, Parameter(help="Rounds.")] = 7,
    link: Annotated[bool, flag("Also refit over a throttled HTTP link and compare with a full transfer.")] = False,
    json: Annotated[Path | None, Parameter(help="Also write the rows to this file.")] = None,
) -> int:
    """Bytes a changed weight and GB/s, ours beside other codecs, on synthetic traces and on those of a run."""
    thread_policy.apply(1)

    from halfbyte.bench import refit as bench
    from halfbyte.bench import table
    from halfbyte.bench.fp4_deltas import fp4_rows, fp4_table
    from halfbyte.bench.link import link_table, race
    from halfbyte.bench.machine import machine
    from halfbyte.bench.refit_traces import TRACES, AdamTrace

    if elements < 1 or repeats < 1:
        raise ConfigError(f"--elements {elements} --repeats {repeats}", expected="positive numbers")
    size, rounds = (min(elements, 1 << 20), min(repeats, 3)) if quick else (elements, repeats)
    schemes, notes = bench.schemes(("fast", "max") if profile == "both" else (profile,))
    rows, coordinates, links = [], [], []
    try:
        for trace in bench.traces(size, run):
            for row in bench.measure(trace, schemes, repeats=rounds):
                rows.append(row)
                print(
                    f"{row.trace} {row.scheme}: {row.bytes_per_change:.3f} bytes a change", file=sys.stderr, flush=True
                )
        coordinates = list(fp4_rows(*AdamTrace(size, *TRACES["3.1%"]).step()))
        if link:
            for found in race(size * 2, profile="max" if profile == "both" else profile):
                links.append(found)
                print(f"link, {found.change_rate:.1%}: {found.speedup:.1f} x", file=sys.stderr, flush=True)
    finally:
        facts = machine()
        tables = [bench.table(rows), fp4_table(coordinates), *([link_table(links)] if links else [])]
        table.show([table.heading(facts), *tables, *notes])
    if json is not None:
        more = {
            "fp4": [row.to_json() for row in coordinates],
            "links": [row.to_json() for row in links],
            "notes": notes,
        }
        table.write_json(json, facts, [row.to_json() for row in rows], **more)
    return 0 if all(row.exact for row in rows) else 1


def plan(
    *,
    parameters: Annotated[float, Parameter(help="Weights of the model; 1e12 is the cross-region case.")] = 1e12,
    change_rate: Annotated[float, Parameter(help="Share of weights that change, such as 0.03.")] = 0.03,
    link: Annotated[float, Parameter(help="MB a second of the narrowest link.")] = 381.0,
    ranks: Annotated[int, Parameter(help="Ranks that hold the model together.")] = 64,
    copies: Annotated[int, Parameter(help="How often the bytes cross that link.")] = 1,
    profile: Annotated[Literal["fast", "max"], Parameter(help="Codec profile.")] = "fast",
    encode_threads: Annotated[int, Parameter(help="Threads of the publisher.")] = 64,
    encode_rate: Annotated[
        float, Parameter(help="GB a second and thread that the publisher compares and encodes.")
    ] = 6.0,
    apply_rate: Annotated[float, Parameter(help="GB a second that a rank decodes and applies.")] = 10.0,
    latency: Annotated[float, Parameter(help="Seconds of a store operation.")] = 0.05,
    json: Annotated[bool, flag("Print one JSON object.")] = False,
) -> int:
    """What a refit will cost by phase, beside a full transfer; the defaults are 1T parameters across regions."""
    from halfbyte.refit.plan import Scenario, over_rates
    from halfbyte.refit.plan import plan as predict

    scenario = Scenario(
        parameters=parameters,
        change_rate=change_rate,
        link=link * 1e6,
        ranks=ranks,
        copies=copies,
        profile=profile,
        encode_threads=encode_threads,
        encode_rate=encode_rate * 1e9,
        apply_rate=apply_rate * 1e9,
        latency=latency,
    )
    cost = predict(scenario)
    if json:
        print(json_text.dumps(cost.to_json(), indent=2))
        return 0
    print(f"{parameters:.3g} parameters, {change_rate:.2%} changed, {link:g} MB/s, {ranks} ranks, profile {profile}\n")
    print(f"full transfer  {_size(cost.full_bytes):>10}  {_phases(cost.full_seconds)}  = {cost.full_total:,.1f} s")
    print(f"delta          {_size(cost.delta_bytes):>10}  {_phases(cost.delta_seconds)}  = {cost.delta_total:,.1f} s")
    print(f"\n{cost.compared}. At other change rates:")
    for other in over_rates(scenario):
        rate = f"{other.scenario.change_rate:.0%}"
        print(f"{rate:>5}  {_size(other.delta_bytes):>10}  {other.delta_total:>10,.1f} s  {other.speedup:>7.1f} x")
    return 0


def _signer(path: Path | None) -> Signer | None:
    from halfbyte.refit.manifest import Signer

    return None if path is None else Signer(path.read_bytes().strip())


def _way(edge: Any) -> str:
    return f"{edge.kind} {edge.version}" + ("" if edge.parent is None else f" from {edge.parent}")


def _say(done: Refit) -> None:
    before = "nothing" if done.source is None else f"version {done.source.version}"
    repaired = f", {done.repaired_blocks} blocks repaired" if done.repaired_blocks else ""
    print(
        f"{before} -> version {done.target.version}: {'+'.join(done.kinds) or 'no change'}, {done.changed:,} elements, "
        f"{_size(done.fetched_bytes)}, {done.prepare_seconds:.2f} s while serving, "
        f"{1e3 * done.pause_seconds:.1f} ms paused{repaired}",
        flush=True,
    )


def _phases(seconds: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:,.1f} s" for name, value in seconds.items())


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
