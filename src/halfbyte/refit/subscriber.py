"""The subscriber: brings a target to the store's HEAD, wholly or not at all.

Everything that can take long or fail comes before the pause: fetch, check, decode, fold several versions into one patch,
compare with the target's bytes, stage. The pause is the commit alone. If a commit fails, or another rank's does, the old
values are written back and the engine goes on with the version it had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from halfbyte.errors import RefitError
from halfbyte.refit.disk import Disk
from halfbyte.refit.errors import CorruptError, ObjectMissingError, RewoundError, StoreError, TargetError
from halfbyte.refit.fetch import Fetcher
from halfbyte.refit.fold import Folding
from halfbyte.refit.head import Catalogue, Edge, Head, read_catalogue, read_head
from halfbyte.refit.journal import Journal, Record
from halfbyte.refit.leases import LEASE_SECONDS, Lease, drop_lease, write_lease
from halfbyte.refit.manifest import Manifest, Signer
from halfbyte.refit.parallel import worker_threads
from halfbyte.refit.patch import Stamp, Update
from halfbyte.refit.prepare import Names, audit, chain, target_state
from halfbyte.refit.ranks import Alone, Goal, Votes
from halfbyte.refit.repair import StoreRepair
from halfbyte.refit.route import Node, bases_at, find_route
from halfbyte.refit.state import StateHash
from halfbyte.refit.steps import Steps
from halfbyte.refit.store.protocol import ReadStore, Store
from halfbyte.refit.target import Target

__all__ = ["Refit", "Subscriber"]


@dataclass(frozen=True)
class Refit:
    """What one refit did.

    Arguments:
        source, target: versions before and after; source is None where the target did not say what it held.
        kinds: kinds of the versions fetched, in order; empty where the content was there already.
        fetched_bytes: manifests, objects and ranges.
        changed: elements written.
        repaired_blocks: blocks that were damaged and came from the store again.
        prepare_seconds: fetching, checking, decoding, staging; the engine served meanwhile.
        pause_seconds: from pause to resume.
    """

    source: Stamp | None
    target: Stamp
    kinds: tuple[str, ...]
    fetched_bytes: int
    changed: int
    repaired_blocks: int
    prepare_seconds: float
    pause_seconds: float


class Subscriber:
    """Follows one run of a store into one target. Not for use by several threads at once.

    Arguments:
        store: where versions come from; a read-only store works without leases.
        target: what takes them.
        folder: where journal and fetched objects lie. Needed for a target that survives this process.
        name: this reader's name, for its lease; unique among the readers of a store.
        run: refuse any other run.
        votes: how ranks agree; alone by default.
        signer: demand signed manifests.
        audit_anchors: hash all of the target's bytes when a refit arrives at a full version, and repair what differs.
        disk: file operations.
        clock: seconds, for the report.
        sleep: waits.
    """

    def __init__(
        self,
        store: ReadStore,
        target: Target,
        *,
        folder: Path | None = None,
        name: str = "reader",
        run: str | None = None,
        votes: Votes | None = None,
        signer: Signer | None = None,
        audit_anchors: bool = True,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store, self.target, self.name, self.run = store, target, name, run
        self.votes, self.audit_anchors, self.clock, self.sleep = votes or Alone(), audit_anchors, clock, sleep
        self.threads = worker_threads()
        if folder is None and target.survives:
            raise TargetError(
                "weights that outlive this process need a journal", fix="give the subscriber a folder of its own"
            )
        disk = disk or Disk()
        self.journal = None if folder is None else Journal(folder, disk)
        cache = None if folder is None else folder / "objects"
        self.fetcher = Fetcher(store, signer=signer, cache=cache, disk=disk, threads=self.threads)
        self.fetcher.progress = self._renew
        self._memory = Record()
        self._lease: Lease | None = None
        self._leased_at = 0.0
        self._names: Names | None = None
        self._state: StateHash | None = (
            None  # what the target's bytes should be, by published names; None: not known yet
        )
        self._suspect = False  # the bytes may not be what ``_state`` says: the next refit looks, and repairs
        self._held = self._recover()
        if self.journal is not None and self._held is not None:
            self._suspect = True  # a new process looks once at what it finds

    @property
    def held(self) -> Stamp | None:
        """The version the target holds, as far as is known without reading it."""
        return self._held

    def refit(self) -> Refit | None:
        """Go to HEAD, or as far as the ranks agree; None where there is nothing to do.

        Raises:
            RewoundError: the store shows an older version than it did before.
            RefitError: anything else that prevents it; the target serves what it served, and the next call tries again.
        """
        for attempt in (1, 2):  # between two reads HEAD may move on, and garbage collection with it
            started = self.clock()
            found = read_head(self.store)
            if found is None or found[0].version is None:
                return None
            head = found[0]
            self._check_order(head)
            goal = self.votes.goal(None if self._suspect else self._held, head)
            if goal is None:
                return None
            try:
                done = self._go(goal, head, started)
                if done is None:  # what is held was looked at and is sound; now to what is new
                    goal = self.votes.goal(self._held, head)
                    done = None if goal is None else self._go(goal, head, started)
                return done
            except ObjectMissingError:
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def state(self, block: int) -> StateHash:
        """Block hashes of what the target holds; of what its bytes are, where no refit has told."""
        if self._state is None:
            self._names = Names(self.target.infos(), {})
            self._state = target_state(self.target, self._names, block, self.threads)
        return self._state

    def adopt(self, update: Update, state: StateHash) -> None:
        """Commit an update that the caller prepared against this very target (a publisher's own version)."""
        self.target.stage(update)
        try:
            if self.target.survives and self.journal is not None:
                self.journal.begin(update, "")
            self.target.commit(update)
        finally:
            self.target.discard(update)
        self._took(update, state, {})

    def follow(self, *, interval: float = 1.0, patience: int | None = None) -> Iterator[Refit | RefitError]:
        """Refit again and again, yielding each refit, and each error (somebody may want to see it; the next try goes on).

        Arguments:
            interval: seconds between looks at HEAD.
            patience: raise after so many errors in a row; None never does.
        """
        failures = 0
        while True:
            try:
                done = self.refit()
                failures = 0
                if done is not None:
                    yield done
                    continue
            except RefitError as error:
                failures += 1
                if patience is not None and failures > patience:
                    raise
                yield error
            self.sleep(interval)

    def audit(self) -> dict[str, tuple[int, ...]]:
        """Hash all of the target's bytes: tensor -> damaged blocks. The next refit repairs them, new version or not."""
        if self._state is None or self._names is None:
            return {}
        damaged = audit(self.target, self._names, self._state, self.threads)
        self._suspect = self._suspect or bool(damaged)
        return damaged

    # ---- the way to a goal

    def _go(self, goal: Goal, head: Head, started: float) -> Refit | None:
        fetched = self.fetcher.fetched_bytes
        catalogue = read_catalogue(self.store, head)
        own = self.fetcher.steps((), goal.head)[-1]
        held = self._known_state(own)
        route = find_route(catalogue, goal.head, self._start(catalogue, goal.head, held))
        self._take_lease(route, goal.head)
        repair = StoreRepair(self.fetcher, catalogue, goal.head)
        try:
            update, state = self._prepare(goal.head, catalogue, route, own, repair)
        except RefitError:
            self.votes.agree(_ballot(goal, "prepared"), False)  # the others need not wait for this rank
            raise
        if not goal.ballot and not update.changes and update.target == self._held == self.target.stamp():
            self._took(update, state, own.aliases)
            return None
        try:
            failure = self._stage(update)
            agreed = self.votes.agree(_ballot(goal, "prepared"), failure is None)
            if failure is not None:
                raise failure
            if not agreed:
                raise TargetError(
                    "another rank is not prepared; nothing was changed", where=f"version {goal.head.version}"
                )
            self._begin(update, goal)
            prepared = self.clock()
            self._commit(update, goal)
            paused = self.clock()
        finally:
            self.target.discard(update)
        self._took(update, state, own.aliases)
        return Refit(
            source=update.source,
            target=update.target,
            kinds=tuple(edge.kind for edge in route),
            fetched_bytes=self.fetcher.fetched_bytes - fetched,
            changed=update.changed,
            repaired_blocks=repair.repaired_blocks,
            prepare_seconds=prepared - started,
            pause_seconds=paused - prepared,
        )

    def _known_state(self, own: Manifest) -> StateHash:
        """Block hashes of what the target should hold; read from its bytes where nothing better is known."""
        if self._state is not None and self._names is not None and self._state.block == own.block:
            return self._state
        self._names = Names(self.target.infos(), own.aliases)
        kept = self.journal.state() if self.journal is not None else None
        if (
            kept is not None
            and kept.block == own.block
            and {n: kept.infos[n] for n in kept.infos} == self._published_infos()
        ):
            self._state, self._suspect = kept, True  # the bytes are compared with it before anything is built on them
        else:
            self._state = target_state(self.target, self._names, own.block, self.threads)
        return self._state

    def _published_infos(self) -> Mapping[str, object]:
        assert self._names is not None
        infos = self.target.infos()
        return {name: replace(infos[self._names.held(name)[0]], name=name) for name in self._names.published()}

    def _start(self, catalogue: Catalogue, goal: Head, held: StateHash) -> Node:
        digest = held.digest()
        if digest == goal.state and goal.version is not None:
            return (goal.version, goal.state)
        return bases_at(catalogue, digest)

    def _prepare(
        self, goal: Head, catalogue: Catalogue, route: Sequence[Edge], own: Manifest, repair: StoreRepair
    ) -> tuple[Update, StateHash]:
        """Fetch the steps, folding every tensor as soon as all that concerns it is there."""
        names, held, stamp = self._names, self._state, goal.stamp
        assert names is not None
        assert held is not None
        assert stamp is not None
        steps = Steps(self.fetcher.steps(route, goal)[: len(route)])
        folding = Folding(self.target, names, own.block, self._damaged(catalogue, goal, names, held, steps))
        with ThreadPoolExecutor(self.threads) as pool:
            work = [
                pool.submit(call)
                for ref, data in self.fetcher.stream(steps.objects())
                for name, plan in steps.arrived(ref, data)
                for call in folding.work(name, plan)
            ]
            for done in work:
                done.result()
        state, plans = chain(held, steps.steps())
        if state.digest() != own.state or state.schema() != own.schema:
            raise CorruptError("the steps in the catalogue do not lead to HEAD", where=f"version {goal.version}")
        for name, plan in plans.items():
            if plan.info is None and names.held(name):
                folding.tensor(name, plan)  # removed: there was no object to wait for
        return folding.update(self._held, stamp, state, repair, self.threads), state

    def _damaged(
        self, catalogue: Catalogue, goal: Head, names: Names, held: StateHash, steps: Steps
    ) -> dict[str, tuple[int, ...]]:
        """Blocks of the target that are not what they should be, where there is reason to look."""
        anchored = any(edge.kind == "full" and edge.version == goal.version for edge in catalogue.edges)
        if not self._suspect and not (self.audit_anchors and anchored):
            return {}
        after = steps.infos(held.infos)
        found = audit(self.target, names, held, self.threads)
        return {name: blocks for name, blocks in found.items() if blocks and after.get(name) == held.infos.get(name)}

    def _took(self, update: Update, state: StateHash, aliases: Mapping[str, str]) -> None:
        """The target holds ``update.target``."""
        self._state, self._held, self._suspect = state, update.target, False
        self._names = Names(self.target.infos(), aliases)
        self._finish()

    def _stage(self, update: Update) -> RefitError | None:
        try:
            self.target.stage(update)
        except RefitError as error:
            return error
        except Exception as error:
            return _target_error("the target could not stage the update", error)
        return None

    def _begin(self, update: Update, goal: Goal) -> None:
        if self.target.survives and self.journal is not None:
            try:
                self.journal.begin(update, _ballot(goal, "committed"))
            except OSError as error:
                self.votes.agree(_ballot(goal, "committed"), False)
                raise _target_error("the commit's log cannot be written", error) from error

    def _commit(self, update: Update, goal: Goal) -> None:
        """Pause, commit on all ranks or on none, resume."""
        failure: BaseException | None = None
        try:
            self.target.pause()
            self.target.commit(update)
        except (Exception, KeyboardInterrupt) as error:
            failure = error
        if self._agree_in_pause(_ballot(goal, "committed"), failure is None):
            self.target.resume()
            return
        try:
            self.target.rollback(update)
        except Exception as error:
            self._suspect = True
            raise _target_error(
                "the target can neither take the update nor return to its old version; it stays paused", error
            ) from error
        self.target.resume()
        if self.target.survives and self.journal is not None:
            self.journal.end(update.source)
        if isinstance(failure, KeyboardInterrupt):
            raise failure
        what = "the target failed to take the update and serves its old version again"
        if failure is None:
            what = "another rank failed to take the update; all serve their old version again"
        raise _target_error(what, failure) from failure

    def _agree_in_pause(self, ballot: str, ok: bool) -> bool:
        """The verdict, asked for until the votes answer: nobody may resume without it."""
        try:
            return self.votes.agree(ballot, ok)
        except StoreError:
            for pause in (0.1, 0.5, 1.0, 2.0, 5.0):
                self.sleep(pause)
                with suppress(StoreError):
                    return self.votes.verdict(ballot)
            self._suspect = True
            raise

    # ---- memory

    def _recover(self) -> Stamp | None:
        """Finish or undo what a killed process was committing; the version then held."""
        if self.journal is None or not self.target.survives:
            return self.target.stamp()
        pending = self.journal.pending()
        if pending is not None:
            commit = self.votes.verdict(self.journal.record.ballot)
            self.target.rollback(pending)
            if commit:
                self.target.commit(pending)
            self.journal.end(pending.target if commit else pending.source)
        return self.journal.record.stamp

    def _record(self) -> Record:
        return self._memory if self.journal is None else self.journal.record

    def _check_order(self, head: Head) -> None:
        """HEAD never goes back within an epoch, and a version never changes its content.

        Raises:
            RewoundError: it does.
        """
        where, held, seen = repr(self.store), self._held, self._record().seen
        if self.run is not None and head.run != self.run:
            raise RewoundError(f"the store holds run {head.run!r}", where=where, expected=self.run)
        fix = "if this is meant, remove the subscriber's folder and start the engine again"
        if held is not None and held.run != head.run:
            raise RewoundError(f"the target holds run {held.run!r}, the store {head.run!r}", where=where, fix=fix)
        if head.order() < seen:
            raise RewoundError(
                f"HEAD is at epoch {head.epoch}, version {head.version}; it was at epoch {seen[0]}, version {seen[1]}",
                where=where,
                expected="a HEAD that does not go back",
                fix=fix,
            )
        if held is not None and head.order() == seen and held.version == head.version and held.state != head.state:
            raise RewoundError(f"version {head.version} has other content than it had", where=where, fix=fix)
        if head.order() > seen:
            if self.journal is None:
                self._memory = replace(self._memory, seen=head.order())
            else:
                self.journal.write(seen=head.order())

    def _take_lease(self, route: Sequence[Edge], goal: Head) -> None:
        self._lease = Lease(self.name, tuple(sorted({*(edge.manifest for edge in route), goal.manifest})))
        self._leased_at = float("-inf")
        self._renew()

    def _renew(self) -> None:
        """Write the lease again if it is getting old. A store that takes no writes is read without leases."""
        now = time.monotonic()
        if self._lease is not None and now - self._leased_at > LEASE_SECONDS / 8 and isinstance(self.store, Store):
            with suppress(StoreError):
                write_lease(self.store, self._lease)
                self._leased_at = now

    def _finish(self) -> None:
        """What a later attempt would do as well: none of it may turn a refit that happened into an error."""
        if self.journal is not None:
            with suppress(OSError):
                self.journal.end(self._held, self._state)
                self.fetcher.forget()
        self._lease = None
        if isinstance(self.store, Store):
            with suppress(StoreError):
                drop_lease(self.store, self.name)


def _ballot(goal: Goal, question: str) -> str:
    return f"{goal.ballot}/{question}"


def _target_error(what: str, cause: BaseException | None) -> RefitError:
    if cause is None:
        return TargetError(what)
    first = str(cause).splitlines()[0] if str(cause) else ""
    return TargetError(f"{what} ({type(cause).__name__}: {first})")
