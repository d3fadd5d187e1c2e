"""A pool of child processes: at most so many at a time, a fresh one for each run, none that outlives the study.

A fresh process gives every run its own thread settings (they must be in the environment before torch loads) and its own
memory, and a run that is killed takes nothing with it. Children read a pipe that closes when the study dies, however it dies.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Command", "environment_of", "run_pool"]


@dataclass(frozen=True)
class Command:
    """A process to run.

    Arguments:
        name: handed back to the callbacks.
        arguments: program and its arguments.
        log: file that its output is appended to.
    """

    name: str
    arguments: Sequence[str]
    log: Path


def environment_of(threads: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of a child with ``threads`` threads that wait without spinning."""
    waiting = {} if "OMP_WAIT_POLICY" in environ else {"OMP_WAIT_POLICY": "PASSIVE"}
    return {**environ, **waiting, "HALFBYTE_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}


def run_pool(
    commands: Iterable[Command],
    *,
    processes: int,
    environ: Mapping[str, str],
    ended: Callable[[str, int], None],
    tick: Callable[[Sequence[str]], None] = lambda running: None,
    interval: float = 0.2,
) -> bool:
    """Run all commands, in order, ``processes`` at a time. False if an interrupt (Ctrl-C) ended it early.

    The first interrupt asks children to stop (a run then ends after its step, with a checkpoint), the second one kills them.

    Arguments:
        ended: called with name and exit code (negative: a signal) of every process, in the order they end.
        tick: called with the names of the running ones about every ``interval`` seconds.
    """
    waiting = iter(commands)
    children: dict[str, subprocess.Popen[bytes]] = {}
    stopping, more = False, True
    try:
        while more or children:
            try:
                while more and not stopping and len(children) < processes:
                    command = next(waiting, None)
                    if command is None:
                        more = False
                    else:
                        children[command.name] = _start(command, environ)
                tick(tuple(children))
                time.sleep(interval)
                for name in [name for name, child in children.items() if child.poll() is not None]:
                    child = children.pop(name)
                    _close(child)
                    ended(name, child.returncode)
            except KeyboardInterrupt:
                if stopping:
                    raise
                stopping, more = True, False
                for child in children.values():
                    child.terminate()
    finally:
        for child in children.values():
            child.kill()
            child.wait()
            _close(child)
    return not stopping


def _start(command: Command, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with command.log.open("ab") as log:
        return subprocess.Popen(
            list(command.arguments),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,  # a Ctrl-C in the terminal is the study's to hand on
        )


def _close(child: subprocess.Popen[bytes]) -> None:
    if child.stdin is not None:
        child.stdin.close()
