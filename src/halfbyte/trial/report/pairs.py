"""Records in pairs: the same task and repeat in both arms, what changed between them, and how often that is noise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from halfbyte.trial.pairs import Pair
from halfbyte.trial.records import Record

__all__ = ["Flips", "Outcome", "change", "flips", "outcomes", "pair_up", "said"]

Change = Literal["regression", "gain", "none"]


def change(pair: Pair) -> Change:
    """What the candidate did to the outcome, by the rules of the verdict: what is missing counts against the candidate."""
    before, after = pair.baseline_passed, pair.candidate_passed
    return "none" if before == after else "gain" if after else "regression"


@dataclass(frozen=True)
class Outcome:
    """A task over its repeats.

    Arguments:
        pairs: in the order of repeats.
        noise: A/A pairs of this task whose two outcomes differ, of ``noise_pairs``.
    """

    task: str
    pairs: tuple[Pair, ...]
    noise: int
    noise_pairs: int

    @property
    def passes(self) -> tuple[int, int]:
        """Repeats that the baseline and the candidate passed."""
        return sum(p.baseline_passed for p in self.pairs), sum(p.candidate_passed for p in self.pairs)

    @property
    def drop(self) -> int:
        """Repeats lost (negative: gained)."""
        before, after = self.passes
        return before - after

    @property
    def shown(self) -> Pair:
        """The pair to look at: the first in which the outcome changed the way the task did, else the first."""
        wanted = "regression" if self.drop > 0 else "gain" if self.drop < 0 else None
        return next((pair for pair in self.pairs if change(pair) == wanted), self.pairs[0])


@dataclass(frozen=True)
class Flips:
    """How pairs differ.

    Arguments:
        pairs: of a task and repeat.
        regressions, gains: pairs with another outcome.
        texts: pairs with another text.
    """

    pairs: int
    regressions: int
    gains: int
    texts: int

    @property
    def flipped(self) -> int:
        """Pairs with another outcome, either way."""
        return self.regressions + self.gains


def said(record: Record) -> str:
    """The response as text, tool calls behind it."""
    return f"{record.text}\n[tool calls] {record.calls}".lstrip("\n") if record.calls else record.text


def pair_up(records: Iterable[Record]) -> tuple[tuple[Pair, ...], int]:
    """Pairs in the order of their first record, and how many records have no partner (or stand there twice)."""
    found: dict[tuple[str, int], dict[str, Record]] = defaultdict(dict)
    alone = 0
    for record in records:
        arms = found[record.task, record.repeat]
        alone += record.arm in arms
        arms.setdefault(record.arm, record)
    pairs = [Pair(arms["baseline"], arms["candidate"]) for arms in found.values() if len(arms) == 2]
    return tuple(pairs), alone + sum(len(arms) == 1 for arms in found.values())


def flips(pairs: Iterable[Pair]) -> Flips:
    """Counts over pairs."""
    pairs = list(pairs)
    changes = [change(pair) for pair in pairs]
    texts = sum(said(pair.baseline) != said(pair.candidate) for pair in pairs)
    return Flips(len(pairs), changes.count("regression"), changes.count("gain"), texts)


def outcomes(pairs: Sequence[Pair], pilot: Sequence[Pair] = ()) -> tuple[Outcome, ...]:
    """Tasks with their pairs, in the order in which they first appear."""
    grouped: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        grouped[pair.task].append(pair)
    noise: dict[str, list[Pair]] = defaultdict(list)
    for pair in pilot:
        noise[pair.task].append(pair)
    return tuple(
        Outcome(
            task,
            tuple(sorted(found, key=lambda pair: pair.baseline.repeat)),
            flips(noise[task]).flipped if task in noise else 0,
            len(noise.get(task, ())),
        )
        for task, found in grouped.items()
    )
