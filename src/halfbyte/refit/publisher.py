"""The publisher: makes a version of a trainer's weights in a store. A version exists when HEAD says so, and not before.

Order of a publication: encode against the baseline; decode again and compare; put objects and read them back; put the manifest
and the catalogue; swap HEAD; and only then move the baseline. Whatever dies or fails before the swap leaves the old version and
the old baseline, so no change is ever lost; whatever dies after it is made good by the next start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.refit.arrays import Bytes, TensorInfo, flat_bytes, info_of
from halfbyte.refit.baseline import baseline_target
from halfbyte.refit.codec import BLOCK, Profile, TensorDelta, apply, encode
from halfbyte.refit.disk import Disk
from halfbyte.refit.draft import Draft, Row, changed_rows, delta_row, pack, whole_rows
from halfbyte.refit.errors import (
    CorruptError,
    FencedError,
    RewoundError,
    StoreConflictError,
    StoreError,
    WrongBaseError,
)
from halfbyte.refit.fold import prepare_update
from halfbyte.refit.head import Head
from halfbyte.refit.history import History
from halfbyte.refit.keys import manifest_key, object_key
from halfbyte.refit.manifest import Kind, Manifest, ObjectRef, Signer, TensorChange
from halfbyte.refit.parallel import each, worker_threads
from halfbyte.refit.patch import Stamp, Update
from halfbyte.refit.prepare import Names, Plan, advance
from halfbyte.refit.reign import Reign
from halfbyte.refit.route import skip_parents
from halfbyte.refit.state import StateHash
from halfbyte.refit.store.protocol import Store
from halfbyte.refit.subscriber import Subscriber
from halfbyte.refit.ties import TiePolicy, untie

__all__ = ["PublishOptions", "Published", "Publisher"]


@dataclass(frozen=True)
class PublishOptions:
    """How versions are written.

    Arguments:
        profile: ``fast`` or ``max``, see the codec.
        ties: what to do with names that share memory.
        anchor_every: a full version beside the delta at least so often; 0 never.
        anchor_chain: ... and as soon as the deltas since the last one are this many times as large as it.
        skip_levels: skips over 2, 4, ..., 2**levels versions.
        history_bytes: memory for the old values that skips are made of; None: as much as the weights.
        density: a delta larger than this share of the full version is written as a full version.
        object_bytes: objects are about this large.
        read_back: read every object again and compare before HEAD names it.
        block: elements of a codec block, for a new store.
    """

    profile: Profile = "fast"
    ties: TiePolicy = "once"
    anchor_every: int = 64
    anchor_chain: float = 2.0
    skip_levels: int = 6
    history_bytes: int | None = None
    density: float = 0.6
    object_bytes: int = 1 << 27
    read_back: bool = True
    block: int = BLOCK


@dataclass(frozen=True)
class Published:
    """What a publication did.

    Arguments:
        stamp: the version.
        kind: ``full``, ``delta``, ``noop`` or ``skip`` (a delta whose number does not follow its parent's).
        bytes: of manifest and objects of the version itself, without skips and anchors.
        payload_bytes: of the tensors' deltas (or bytes, for a full version) alone; the same for the same weights.
        full_bytes: of all tensors.
        changed, elements: elements whose bits differ, of how many.
        encode_seconds, store_seconds, upkeep_seconds: encoding and checking; putting until HEAD is swapped; baseline, skips and
            anchors, while subscribers may already fetch the version.
        upkeep_error: why a skip or an anchor could not be written ("" if all went well); the next publication tries again.
        update: the change as it was decoded from what was stored, for a target in this process (see ``refit.local``).
    """

    stamp: Stamp
    kind: Kind
    bytes: int
    payload_bytes: int
    full_bytes: int
    changed: int
    elements: int
    encode_seconds: float
    store_seconds: float
    upkeep_seconds: float
    upkeep_error: str = ""
    update: Update | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, eq=False)
class _Next:
    """A version that is written, with what it makes of the baseline."""

    draft: Draft
    update: Update
    state: StateHash
    payload: int


class Publisher:
    """The one writer of a run. Opening it takes the run over: an older publisher is fenced and its next call fails.

    Arguments:
        store: where versions go.
        run: the run's name.
        options: how.
        baseline: folder of a mapped baseline; None keeps it in memory (and reads it from the store at the start).
        signer: signs manifests, and demands signed ones when the baseline is read.
        disk: file operations of a mapped baseline.
        clock: seconds since 1970, for manifests.
    Raises:
        FencedError: another publisher took the run over at this moment.
        LayoutError: not a run's name, or the store holds another run.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        options: PublishOptions | None = None,
        baseline: Path | None = None,
        signer: Signer | None = None,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store, self.run, self.options, self.signer, self.clock = (
            store,
            run,
            options or PublishOptions(),
            signer,
            clock,
        )
        self.threads = worker_threads()
        self._disk, self._folder = disk or Disk(), baseline
        self._unsure: _Next | None = None  # its swap had no answer
        self._reign = Reign(store, run, read_back=self.options.read_back)
        self._load()

    @property
    def head(self) -> Head:
        """HEAD as this publisher last wrote it."""
        return self._reign.head

    def publish(
        self,
        tensors: Mapping[str, Any],
        *,
        version: int | None = None,
        infos: Mapping[str, TensorInfo] | None = None,
        statistics: Mapping[str, int | float] | None = None,
    ) -> Published:
        """Make these weights the next version.

        Arguments:
            tensors: name -> numpy array or torch tensor; all of them, changed or not.
            version: its number; by default one more than HEAD's (0 for the first).
            infos: dtype and shape of tensors whose array does not tell (packed codes).
            statistics: numbers for people, kept in the manifest.
        Raises:
            RewoundError: a version that is not after HEAD's (see :meth:`rewind`).
            FencedError: another publisher has taken over.
            StoreError: the store failed; nothing was published, or the next call finds out that it was. (A conflict: a write
                given up as lost came through late; publish again.)
        """
        started = time.perf_counter()
        number = self._number(version)
        return self._commit(self._encode(number, tensors, infos or {}, statistics or {}), started)

    def publish_deltas(self, deltas: Mapping[str, TensorDelta], *, version: int | None = None) -> Published:
        """:meth:`publish`, where each change was encoded beside the weights: a tensor without a delta stays as it is.

        Arguments:
            deltas: tensor of HEAD -> its change, from HEAD's values; of the same weights the same bytes are published.
        Raises:
            WrongBaseError: a delta for a tensor that HEAD does not have, or from other values.
        """
        started = time.perf_counter()
        number, infos = self._number(version), self._state.infos
        changed = {name: delta for name, delta in sorted(deltas.items()) if not delta.is_noop}
        unknown = [name for name in changed if name not in infos]
        if unknown or self.head.version is None:
            raise WrongBaseError(f"a delta without the tensor it changes: {', '.join(unknown[:3]) or 'no version yet'}")
        rows: list[Row] = [
            (TensorChange(infos[name], "patch", 0, delta.changed), delta.to_bytes()) for name, delta in changed.items()
        ]
        kind = self._kind(number, rows, infos)
        if kind == "full":

            def now(name: str) -> Bytes:
                data = self._target.read(name)
                if name in changed:
                    data = data.copy()
                    if apply(infos[name].dtype, data, changed[name]).damaged:
                        raise WrongBaseError(f"the delta of tensor {name!r} starts from other values")
                return data

            rows = whole_rows(infos, now)
        return self._commit(self._follow(number, kind, rows, self._aliases, {}), started)

    def held(self, name: str) -> Bytes:
        """The bytes of HEAD's tensor of that name, not to be written to."""
        return self._target.read(name)

    def delta(self, name: str, array: Any) -> TensorDelta:
        """How ``array`` differs from HEAD's tensor of that name, for :meth:`publish_deltas`."""
        info, base = self._state.infos[name], self._state.hashes(name)
        return encode(
            info.dtype,
            self._target.read(name),
            flat_bytes(array),
            self.options.profile,
            block=self._state.block,
            base_hashes=base,
        )

    def _number(self, version: int | None) -> int:
        self.settle()
        last = self.head.version
        number = (0 if last is None else last + 1) if version is None else version
        if last is not None and number <= last:
            raise RewoundError(
                f"version {number} after version {last}",
                where=f"run {self.run!r}",
                expected="a larger one",
                fix="rewind() first, if the trainer resumed from a checkpoint",
            )
        return number

    def _commit(self, following: _Next, started: float) -> Published:
        encoded = time.perf_counter()
        draft, m = following.draft, following.draft.manifest
        self._put(draft)
        self._unsure = following
        self._name_in_head(draft)
        swapped = time.perf_counter()
        self._promote(following)
        problem = self._upkeep()
        weights = following.state.infos.values()
        return Published(
            stamp=following.update.target,
            kind=m.kind,
            bytes=draft.n_bytes,
            payload_bytes=following.payload,
            full_bytes=sum(info.bytes for info in weights),
            changed=sum(change.changed for change in m.tensors),
            elements=sum(info.elements for info in weights),
            encode_seconds=encoded - started,
            store_seconds=swapped - encoded,
            upkeep_seconds=time.perf_counter() - swapped,
            upkeep_error=problem,
            update=following.update,
        )

    def _name_in_head(self, draft: Draft) -> None:
        m = draft.manifest
        try:
            self._reign.swap([draft.edge(self.head.state)], version=m.version, state=m.state, manifest=m.digest())
        except FencedError:
            raise
        except StoreConflictError:
            self._unsure = None
            self._load()
            raise

    def settle(self) -> None:
        """Find out whether a publication whose last answer was lost happened, and move the baseline if it did.

        Raises:
            FencedError: another publisher has taken over.
            StoreError: the store still does not answer.
        """
        unsure = self._unsure
        if unsure is None:
            return
        self._reign.reread()
        if self.head.manifest == unsure.draft.manifest.digest():
            self._promote(unsure)
        self._unsure = None

    def rewind(self, version: int) -> None:
        """Make an older version HEAD again: a trainer resumed from a checkpoint. What came after it is dropped.

        Raises:
            RewoundError: the store does not hold that version any more.
        """
        self.settle()
        if version != self.head.version:
            self._reign.rewind(version)
            self._load()

    # ---- a version

    def _load(self) -> None:
        """Bring the baseline to HEAD."""
        self._target = baseline_target(self._folder and self._folder / "tensors", self._disk)
        self._follower = Subscriber(
            self.store,
            self._target,
            folder=self._folder and self._folder / "journal",
            name=f"{self._reign.name[:90]}.baseline",
            run=self.run,
            signer=self.signer,
            audit_anchors=False,
            disk=self._disk,
        )
        self._follower.refit()
        self._history = History(self.options.history_bytes)
        self._state = self._follower.state(self.options.block)
        digest = self.head.manifest
        self._aliases = dict(self._follower.fetcher.manifest(digest).aliases) if digest else {}

    def _encode(
        self,
        version: int,
        tensors: Mapping[str, Any],
        infos: Mapping[str, TensorInfo],
        statistics: Mapping[str, int | float],
    ) -> _Next:
        arrays, aliases = untie(tensors, self.options.ties)
        found = {name: infos.get(name) or info_of(name, array) for name, array in arrays.items()}
        kind, rows = "full", list[Row]()
        if self.head.version is not None:
            rows = changed_rows(self._state, self._target.read, arrays, found, self.options.profile, self.threads)
            kind = self._kind(version, rows, found)
        if kind == "full":
            rows = whole_rows(found, lambda name: flat_bytes(arrays[name]))
        return self._follow(version, kind, rows, aliases, statistics)

    def _kind(self, version: int, rows: Sequence[Row], infos: Mapping[str, TensorInfo]) -> str:
        """How a version with these changes is best written."""
        size = sum(memoryview(data).nbytes for _, data in rows)
        if size > self.options.density * sum(info.bytes for info in infos.values()):
            return "full"
        assert self.head.version is not None
        return "skip" if version != self.head.version + 1 else "delta" if rows else "noop"

    def _follow(
        self,
        version: int,
        kind: Any,
        rows: Sequence[Row],
        aliases: Mapping[str, str],
        statistics: Mapping[str, int | float],
    ) -> _Next:
        """Pack a version, then read what was packed as a subscriber will, against the baseline."""
        objects, changes = pack(rows, self.options.object_bytes, self._metadata(version))
        entries = Draft.entries_of(objects)
        plans: dict[str, Plan] = {}
        state = advance(self._state, kind == "full", self._state.block, changes, entries, plans, f"version {version}")
        parent = (None, None) if kind == "full" else (self.head.version, self.head.manifest)
        manifest = self._manifest(version, kind, parent, objects, changes, aliases, state, statistics)
        update = prepare_update(
            self._target,
            Names(self._target.infos(), {}),
            self.head.stamp,
            Stamp(self.run, version, manifest.state),
            state,
            plans,
            _no_repair,
            threads=self.threads,
        )
        payload = sum(memoryview(data).nbytes for _, data in rows)
        return _Next(Draft.of(manifest, objects, self.signer), update, state, payload)

    def _manifest(
        self,
        version: int,
        kind: Kind,
        parent: tuple[int | None, str | None],
        objects: Mapping[str, bytes],
        changes: Sequence[Any],
        aliases: Mapping[str, str],
        state: StateHash,
        statistics: Mapping[str, int | float],
    ) -> Manifest:
        return Manifest(
            run=self.run,
            epoch=self.head.epoch,
            version=version,
            kind=kind,
            schema=state.schema(),
            state=state.digest(),
            block=state.block,
            parent=parent[0],
            parent_digest=parent[1],
            objects=tuple(ObjectRef(digest, len(data)) for digest, data in objects.items()),
            tensors=tuple(changes),
            aliases=dict(aliases),
            statistics=dict(statistics),
            created=float(self.clock()),
        )

    def _metadata(self, version: int) -> dict[str, str]:
        """Strings in every object. The epoch keeps a retry after a crash from bringing back a name that is being collected."""
        return {"run": self.run, "epoch": str(self.head.epoch), "version": str(version)}

    def _put(self, draft: Draft) -> None:
        """Objects first, then the manifest that names them; all under a lease until HEAD does."""
        digest = draft.manifest.digest()
        self._reign.promise([manifest_key(digest), *map(object_key, draft.objects)])
        each(lambda item: self._reign.put_object(*item), list(draft.objects.items()), self.threads)
        self._reign.put_manifest(digest, draft.data)

    def _promote(self, following: _Next) -> None:
        """HEAD names the version: it is the baseline now."""
        self._unsure = None
        try:
            self._follower.adopt(following.update, following.state)
        except Exception:
            self._load()  # the store has it all; a disk that fails again says so
            return
        self._state, self._aliases = following.state, dict(following.draft.manifest.aliases)
        self._history.add(following.update, sum(info.bytes for info in self._state.infos.values()))

    # ---- skips and anchors

    def _upkeep(self) -> str:
        """Write the skips and the anchor that are due; "" or what went wrong. The version itself stands already."""
        try:
            edges = [draft.edge(base) for draft, base in self._extra_ways()]
            if edges:
                self._reign.swap(edges)
            self._reign.kept()
        except StoreError as error:
            return str(error).split("\n", 1)[0]
        return ""

    def _extra_ways(self) -> list[tuple[Draft, str]]:
        version, found = self.head.version, []
        assert version is not None
        for parent in skip_parents(version, 0, self.options.skip_levels):
            main, names = self._reign.main_edge(parent), self._history.since(parent)
            if main is not None and names is not None:
                rows = self._since(parent, sorted(names))
                found.append((self._extra("skip", (parent, main.manifest), rows), main.state))
        if self._reign.anchor_due(self.options.anchor_every, self.options.anchor_chain):
            rows = whole_rows(self._state.infos, self._target.read)
            found.append((self._extra("full", (None, None), rows), ""))
        return found

    def _since(self, parent: int, names: Sequence[str]) -> list[Row]:
        def row(name: str) -> Row | None:
            info, now = self._state.infos[name], self._target.read(name)
            return delta_row(
                info, self._history.content(name, now, parent), now, self.options.profile, self._state.block
            )

        return [found for found in each(row, names, self.threads) if found is not None]

    def _extra(self, kind: Kind, parent: tuple[int | None, str | None], rows: Sequence[Row]) -> Draft:
        """Put another way to HEAD's version."""
        version = self.head.version
        assert version is not None
        objects, changes = pack(
            rows, self.options.object_bytes, self._metadata(version) | {"way": f"{kind} from {parent[0]}"}
        )
        manifest = self._manifest(version, kind, parent, objects, changes, self._aliases, self._state, {})
        draft = Draft.of(manifest, objects, self.signer)
        self._put(draft)
        return draft


def _no_repair(wanted: Mapping[str, Sequence[int]], state: StateHash) -> Mapping[str, Mapping[int, Any]]:
    """A baseline that is not what the last version said cannot be published from."""
    raise CorruptError(
        f"the baseline is damaged in {len(wanted)} tensors ({', '.join(list(wanted)[:3])})",
        fix="open the publisher again; it repairs the baseline from the store",
    )
