"""The child process of one run: train (or go on), evaluate what is served, clear up, and say that it is finished.

``python -m halfbyte.study.worker FOLDER`` reads ``FOLDER/task.json``. Exit codes as of the command line; 130 when stopped.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from pathlib import Path

from halfbyte.config import Config
from halfbyte.errors import DataError, NumericsError, UserError
from halfbyte.files import read_object, write_object
from halfbyte.study.deployed import evaluate_deployed
from halfbyte.train import run

__all__ = ["main", "work"]


def work(folder: Path) -> int:
    """Do what is missing of the run in ``folder``; 0 when it is finished, 130 when it was stopped.

    A run whose numbers stop being finite is finished, too: ``outcome.json`` says so, and it will not be tried again, since it
    would end the same way.

    Raises:
        UserError: anything else that a user can mend.
    """
    task = read_object(folder / "task.json")
    if task is None:
        raise DataError("there is no task here", where=str(folder), expected="task.json of halfbyte study run")
    config = Config.from_json(task["config"], str(folder / "task.json"))
    if not (folder / "summary.json").is_file():
        try:
            code = run(config, resume=(folder / "config.json").is_file())
        except NumericsError as error:
            write_object(folder / "outcome.json", {"outcome": "broken", "message": str(error)})
            return 0
        if code:
            return code
    served = read_object(folder / "deployed.json") or {}
    for precision in task["deployed"]:
        if precision not in served:
            served[precision] = evaluate_deployed(folder / "model", config, precision)
    if not task["keep_checkpoints"]:
        for name in ("checkpoints", "refit"):
            shutil.rmtree(folder / name, ignore_errors=True)
    write_object(folder / "deployed.json", served)
    return 0


def main() -> int:
    """The process; ends at once when its parent does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(130))  # training has its own way to stop
    try:
        return work(Path(sys.argv[1]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _end_with_parent() -> None:
    """A pipe that only the parent holds open: its end is the parent's."""
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
