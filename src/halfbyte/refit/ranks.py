"""Ranks decide together: a version is committed by all of them or by none.

Votes lie in a store that all ranks reach. A round has a goal (the HEAD that the first rank saw) and two questions: are all
prepared, and have all committed? Each rank writes yes or no, and the verdict is a cell that is written once: yes when all have
said yes, no as soon as one says no or is missed for too long. Whoever writes it first decides, so a rank that comes late, or
comes back from the dead, reads the same answer as everybody else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from halfbyte.refit.errors import CorruptError, ObjectMissingError, StoreConflictError
from halfbyte.refit.head import Head
from halfbyte.refit.manifest import canonical
from halfbyte.refit.patch import Stamp
from halfbyte.refit.store.protocol import Store

__all__ = ["Alone", "Goal", "StoreVotes", "Votes"]

_ROUNDS_KEPT = 16


@dataclass(frozen=True)
class Goal:
    """Where to go next.

    Arguments:
        head: the version.
        ballot: the round in which the ranks decide on it; "" where this rank goes alone.
    """

    head: Head
    ballot: str


class Votes(Protocol):
    """How the ranks of one engine agree."""

    def goal(self, held: Stamp | None, head: Head) -> Goal | None:
        """Where this rank goes, given what it holds and the HEAD it sees; None: nowhere now."""
        ...

    def agree(self, ballot: str, ok: bool) -> bool:
        """Say yes or no and wait for the verdict: yes only if every rank says yes in time."""
        ...

    def verdict(self, ballot: str) -> bool:
        """What was decided, asked by a rank that died in between; an open question is closed with no."""
        ...


class Alone:
    """One rank: HEAD is the goal and its own answer the verdict. Interrupted commits are completed."""

    def goal(self, held: Stamp | None, head: Head) -> Goal | None:
        """See :class:`Votes`."""
        return None if held == head.stamp else Goal(head, "")

    def agree(self, ballot: str, ok: bool) -> bool:
        """See :class:`Votes`."""
        return ok

    def verdict(self, ballot: str) -> bool:
        """See :class:`Votes`."""
        return True


@dataclass
class StoreVotes:
    """Votes as small objects in a store (the refit store, or a folder that the ranks share).

    Arguments:
        store: where.
        group: name of the engine, the same on all its ranks and on no other engine.
        rank, size: this rank, of how many.
        timeout: seconds a rank waits for the others; the engine is paused for as long in the second vote.
        interval: seconds between looks.
        clock, sleep: for tests.
    """

    store: Store
    group: str
    rank: int
    size: int
    timeout: float = 30.0
    interval: float = 0.02
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def goal(self, held: Stamp | None, head: Head) -> Goal | None:
        """See :class:`Votes`.

        A rank that does not hold what the ranks last agreed on goes there alone; otherwise it joins the open round, or opens one.
        """
        while True:
            cell = self.store.read_cell(self._key("goal"))
            number, goal, good = (0, None, None) if cell is None else self._parse(cell.data)
            if goal is not None:
                committed = self._decided(f"{number:06d}/committed")
                good = goal if committed else good
                open_round = committed is None and self._decided(f"{number:06d}/prepared") is not False
            else:
                open_round = False
            if good is not None and held != good.stamp:
                return Goal(good, "")
            if open_round:
                assert goal is not None
                return Goal(goal, f"{number:06d}")
            if held == head.stamp:
                return None
            table = {
                "number": number + 1,
                "head": head.to_bytes().decode(),
                "good": None if good is None else good.to_bytes().decode(),
            }
            try:
                self.store.swap(self._key("goal"), canonical(table), None if cell is None else cell.tag)
            except StoreConflictError:
                continue  # another rank opened it
            self._forget(number + 1 - _ROUNDS_KEPT)
            return Goal(head, f"{number + 1:06d}")

    def agree(self, ballot: str, ok: bool) -> bool:
        """See :class:`Votes`."""
        if not _round(ballot):
            return ok
        self.store.put(self._key(ballot, f"rank{self.rank}"), b"yes" if ok else b"no")
        end = self.clock() + self.timeout
        while True:
            decided = self._decided(ballot)
            if decided is not None:
                return decided
            said = [self._said(ballot, rank) for rank in range(self.size)]
            if b"no" in said:
                return self._decide(ballot, False)
            if all(said):
                return self._decide(ballot, True)
            if self.clock() >= end:
                return self._decide(ballot, False)
            self.sleep(self.interval)

    def verdict(self, ballot: str) -> bool:
        """See :class:`Votes`."""
        if not _round(ballot):
            return True
        decided = self._decided(ballot)
        return self._decide(ballot, False) if decided is None else decided

    def _decide(self, ballot: str, answer: bool) -> bool:
        try:
            self.store.swap(self._key(ballot, "verdict"), b"yes" if answer else b"no", None)
        except StoreConflictError:
            decided = self._decided(ballot)
            assert decided is not None
            return decided
        return answer

    def _decided(self, ballot: str) -> bool | None:
        cell = self.store.read_cell(self._key(ballot, "verdict"))
        return None if cell is None else cell.data == b"yes"

    def _said(self, ballot: str, rank: int) -> bytes | None:
        try:
            return self.store.get(self._key(ballot, f"rank{rank}"), limit=16)
        except ObjectMissingError:
            return None

    def _forget(self, number: int) -> None:
        if number > 0:
            for entry in list(self.store.list(self._key(f"{number:06d}"))):
                self.store.delete(entry.key)

    def _parse(self, data: bytes) -> tuple[int, Head, Head | None]:
        where = f"{self.store}: {self._key('goal')}"
        try:
            table = json.loads(data)
            number, head, good = int(table["number"]), table["head"], table["good"]
            return (
                number,
                Head.from_bytes(head.encode(), where),
                None if good is None else Head.from_bytes(good.encode(), where),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptError("not a goal of ranks", where=where) from error

    def _key(self, *parts: str) -> str:
        return "/".join(("votes", self.group, *parts))


def _round(ballot: str) -> str:
    """The round of ``round/question``; "" where the rank goes alone."""
    return ballot.partition("/")[0]
