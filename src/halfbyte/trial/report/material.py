"""Everything a report is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from halfbyte.trial.integrity import Finding
from halfbyte.trial.outcome import Decision
from halfbyte.trial.pairs import Pair
from halfbyte.trial.records import Arm, ArmUsage, Record
from halfbyte.trial.report.pairs import Flips, Outcome, flips, outcomes, pair_up
from halfbyte.trial.review import Note
from halfbyte.trial.settings import Settings
from halfbyte.trial.tasks import Task

__all__ = ["Material"]


@dataclass(frozen=True)
class Material:
    """What the page shows.

    Arguments:
        records: of the run.
        pilot: of the A/A pilot; may be empty.
        tasks: as locked.
        usage: of each arm; may lack an arm that never ran.
        integrity: in the order to be shown.
        environment: versions, machine in words; JSON types.
        notes: of whoever reviewed the regressions.
    """

    decision: Decision
    records: Sequence[Record]
    pilot: Sequence[Record]
    tasks: Sequence[Task]
    settings: Settings
    usage: Mapping[Arm, ArmUsage]
    integrity: Sequence[Finding]
    environment: Mapping[str, Any]
    notes: Sequence[Note] = ()

    @cached_property
    def _paired(self) -> tuple[tuple[Pair, ...], int]:
        return pair_up(self.records)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Pairs of the run."""
        return self._paired[0]

    @property
    def unpaired(self) -> int:
        """Records of the run without a partner."""
        return self._paired[1]

    @cached_property
    def noise(self) -> Flips:
        """How pairs of the pilot differ: the baseline against itself."""
        return flips(self.pilot_pairs)

    @cached_property
    def pilot_pairs(self) -> tuple[Pair, ...]:
        """Pairs of the pilot: both from the baseline."""
        return pair_up(self.pilot)[0]

    @cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Every task that ran in both arms."""
        return outcomes(self.pairs, self.pilot_pairs)

    @cached_property
    def task(self) -> Mapping[str, Task]:
        """Tasks by id."""
        return {task.id: task for task in self.tasks}

    def of(self, arm: Arm) -> list[Record]:
        """Records of an arm."""
        return [record for record in self.records if record.arm == arm]

    def critical(self, task: str) -> bool:
        """The task counts as critical."""
        found = self.task.get(task)
        return found is not None and found.critical

    @cached_property
    def regressions(self) -> tuple[Outcome, ...]:
        """Tasks that the candidate passes less often: critical ones first, then those that lost most."""
        lost = [outcome for outcome in self.outcomes if outcome.drop > 0]
        return tuple(sorted(lost, key=lambda o: (not self.critical(o.task), -o.drop / len(o.pairs), o.task)))

    @cached_property
    def gains(self) -> tuple[Outcome, ...]:
        """Tasks that the candidate passes more often."""
        return tuple(sorted((o for o in self.outcomes if o.drop < 0), key=lambda o: (o.drop / len(o.pairs), o.task)))
