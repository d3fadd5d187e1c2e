"""The trial folder: where everything lies, and how it is opened."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from halfbyte.trial.errors import UnavailableError
from halfbyte.trial.records import Phase
from halfbyte.trial.schedule import Block, make_schedule
from halfbyte.trial.settings import Settings, load_settings
from halfbyte.trial.tasks import Task, load_tasks

__all__ = ["TrialFolder"]


@dataclass(frozen=True)
class TrialFolder:
    """A folder with a trial.toml.

    Arguments:
        path: of the folder.
        settings, tasks: as the files say now.
    """

    path: Path
    settings: Settings
    tasks: tuple[Task, ...]

    @classmethod
    def open(cls, path: Path) -> TrialFolder:
        """Read trial.toml and the tasks; ``path`` may be the folder or its trial.toml.

        Raises:
            UnavailableError: no trial.toml.
            ConfigError, DataError: what is wrong in the files, with the place.
        """
        folder = path.parent if path.name == "trial.toml" else path
        file = folder / "trial.toml"
        if not file.is_file():
            raise UnavailableError("no trial.toml", where=str(folder), fix=f"halfbyte trial init {folder}")
        settings = load_settings(file)
        return cls(folder.resolve(), settings, load_tasks(folder / settings.trial.tasks))

    @property
    def lock(self) -> Path:
        """Hashes of what was locked."""
        return self.path / "lock.json"

    @property
    def outcome(self) -> Path:
        """The decision."""
        return self.path / "outcome.json"

    @property
    def reviews(self) -> Path:
        """Notes of a human on regressions."""
        return self.path / "review.jsonl"

    def records(self, phase: Phase) -> Path:
        """Records of a phase."""
        return self.path / ("records.jsonl" if phase == "run" else "pilot.jsonl")

    def blocks(self, phase: Phase) -> Path:
        """Blocks of a phase."""
        return self.path / ("blocks.jsonl" if phase == "run" else "pilot_blocks.jsonl")

    def abandoned(self, phase: Phase) -> Path:
        """Records of tries that were cut short."""
        return self.path / ("abandoned.jsonl" if phase == "run" else "pilot_abandoned.jsonl")

    def schedule(self, phase: Phase) -> tuple[Block, ...]:
        """The blocks of a phase; the pilot asks every task once."""
        run = self.settings.run
        repeats = run.repeats if phase == "run" else 1
        return make_schedule([task.id for task in self.tasks], repeats, run.block_tasks, self.settings.sampling.seed)

    def tuning_files(self) -> tuple[Path, ...]:
        """What the candidate was tuned on."""
        return tuple(self.path / name for name in self.settings.data.tuning)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from running the same trial.

        Raises:
            UnavailableError: another one does.
        """
        with (self.path / ".running").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UnavailableError("another process runs this trial", where=str(self.path)) from error
            yield
