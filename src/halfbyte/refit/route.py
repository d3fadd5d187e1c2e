"""The cheapest way through the catalogue: from what a subscriber holds, or from nothing, to HEAD."""

from __future__ import annotations

import heapq
from collections import defaultdict

from halfbyte.refit.errors import CorruptError
from halfbyte.refit.head import Catalogue, Edge, Head

__all__ = ["Node", "bases_at", "find_route", "skip_parents"]

#: A version and its state digest; None is "holds nothing that the store knows".
Node = tuple[int, str] | None

#: Bytes that one more request is worth: decides between a long chain of small steps and one larger step.
_HOP = 1 << 16


def bases_at(catalogue: Catalogue, state: str) -> Node:
    """The newest version in the catalogue whose content is ``state``; None if there is none."""
    nodes = {(e.version, e.state) for e in catalogue.edges}
    nodes |= {(e.parent, e.base) for e in catalogue.edges if e.parent is not None}
    found = [version for version, digest in nodes if digest == state]
    return (max(found), state) if found else None


def find_route(catalogue: Catalogue, head: Head, start: Node) -> tuple[Edge, ...]:
    """Steps from ``start`` to HEAD with the fewest bytes; a full version may be the first step from anywhere.

    Raises:
        CorruptError: the catalogue has no way to HEAD, not even through a full version.
    """
    if head.version is None:
        return ()
    goal: Node = (head.version, head.state)
    if start == goal:
        return ()
    leaving: dict[Node, list[Edge]] = defaultdict(list)
    for edge in catalogue.edges:
        leaving[None if edge.parent is None else (edge.parent, edge.base)].append(edge)
    # A full version can be taken from any state: from ``start`` it costs nothing to hold nothing.
    costs: dict[Node, int] = {start: 0, None: 0}
    came: dict[Node, Edge] = {}
    queue: list[tuple[int, int, Node]] = [(0, 0, start), (0, 1, None)]
    count = 2
    while queue:
        cost, _, node = heapq.heappop(queue)
        if node == goal:
            break
        if cost > costs[node]:
            continue
        for edge in leaving[node]:
            there: Node = (edge.version, edge.state)
            total = cost + edge.bytes + _HOP
            if total < costs.get(there, total + 1):
                costs[there], came[there] = total, edge
                heapq.heappush(queue, (total, count, there))
                count += 1
    if goal not in came:
        raise CorruptError(
            f"the store has no way to version {head.version}",
            expected="a full version and the steps after it",
            fix="let the publisher write a full version",
        )
    route: list[Edge] = []
    node = goal
    while node in came:  # neither the start nor "nothing" was come to: costs nothing to be there
        route.append(came[node])
        node = None if route[-1].parent is None else (route[-1].parent, route[-1].base)
    return tuple(reversed(route))


def skip_parents(version: int, first: int, levels: int) -> list[int]:
    """Versions from which a skip to ``version`` is published: ``version - 2**k`` for every k >= 1 that divides it so.

    With them a reader who is n versions behind needs at most about 2 log2 n steps (up to a multiple of a large power of
    two, and down again).

    Arguments:
        version: the version just published.
        first: the oldest version that skips may start from.
        levels: the largest k.
    """
    parents = []
    for k in range(1, levels + 1):
        if version % (1 << k):
            break
        if version - (1 << k) >= first:
            parents.append(version - (1 << k))
    return parents
