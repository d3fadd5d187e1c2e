"""Joining the ranks that ``torchrun`` started, and leaving them: when one fails all end, in bounded time, and one of them speaks.

Nothing here is imported, and no process group made, in a run of one process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from halfbyte.config import Config, difference
from halfbyte.errors import ConfigError, UserError
from halfbyte.learner.ranks import shared
from halfbyte.learner.sharded.group import Group
from halfbyte.train.agreement import together
from halfbyte.train.device import device_of

__all__ = ["LostRankError", "joined"]

_KEY = "halfbyte/first failure"
#: Seconds to ask the store who failed first, before speaking for oneself.
_PATIENCE = 5.0


class LostRankError(UserError):
    """Another rank of the run died or fell silent."""


@contextmanager
def joined(config: Config) -> Iterator[Group]:
    """The ranks of this run, for the length of the block.

    Raises:
        LostRankError: another rank is gone, and nobody has said why.
        SystemExit: another rank has said what is wrong, or will; this one ends without a word.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = device_of(config).type
    store = _store(rank, size, config.learner.rank_timeout)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=config.learner.rank_timeout),
        )
        group = Group(device)
        _same_configuration(group, config)
        yield group
        group.wait()
        dist.destroy_process_group()
    except UserError as error:
        _let_us_finish()
        if error.common:
            if rank:
                raise SystemExit(2) from error  # rank 0 speaks for all
            raise
        if not _is_first(store, rank):
            raise SystemExit(2) from error
        error.add_note(f"rank {rank} of {size}")
        raise
    except (RuntimeError, dist.DistError) as error:
        _let_us_finish()
        first = _is_first(store, rank)
        if not _is_connection(error):
            raise  # a bug of ours
        if not first:
            raise SystemExit(2) from error
        lost = LostRankError(
            "another rank of this run is gone",
            expected=f"an answer within {config.learner.rank_timeout:g} s (learner.rank_timeout)",
            fix="see what ended it (a signal, memory, its host); --resume goes on from the last checkpoint",
        )
        lost.add_note(f"rank {rank} of {size}")
        raise lost from error
    except Exception:
        _is_first(store, rank)
        raise


def _let_us_finish() -> None:
    """torchrun ends the other ranks as soon as one has failed; what must be said takes a moment."""
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(ValueError):  # not in the main thread
            signal.signal(number, signal.SIG_IGN)


def _store(rank: int, size: int, timeout: float) -> Store:
    """The rendezvous: the agent of ``torchrun`` keeps it, so that it outlives any rank; without an agent rank 0 does."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        rank == 0 and not agent,
        timedelta(seconds=timeout),
    )
    return PrefixStore(f"halfbyte/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _is_first(store: Store, rank: int) -> bool:
    """Whether no other rank has failed before; True where nobody can be asked."""
    try:
        store.set_timeout(timedelta(seconds=_PATIENCE))
        return bool(store.compare_set(_KEY, "", str(rank)) == str(rank).encode())
    except (RuntimeError, dist.DistError):
        return True


def _is_connection(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, dist.DistError) or any(
        word in text for word in ("gloo", "NCCL", "Connection", "Timed out")
    )


def _same_configuration(group: Group, config: Config) -> None:
    theirs = shared(group, config.to_json())
    changed = difference(theirs, config)

    def compared() -> None:
        if changed:
            raise ConfigError(
                f"another configuration than rank 0's: {'; '.join(changed)}",
                expected="the same configuration on all ranks",
            )

    together(group, compared)
