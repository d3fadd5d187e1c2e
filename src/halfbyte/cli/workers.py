"""``halfbyte workers``: the rollout workers of a run on Ray, and how many there should be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

__all__ = ["workers"]


def workers(
    run: Annotated[Path, Parameter(help="Run folder.")],
    count: Annotated[int | None, Parameter(help="Workers that the run should have from now on.")] = None,
    /,
) -> int:
    """Show the rollout workers of a run on Ray, or ask a run that goes on for more or fewer."""
    from halfbyte.train.ray.events import summary, write_wanted

    if count is not None:
        write_wanted(run, count)
        print(f"asked for {count}")
        return 0
    print("\n".join(summary(run)) or "no workers: the run plays in its own process")
    return 0
