"""What the run and its workers say to each other. Ray carries it between processes of one run; nothing of it is ever a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from halfbyte.envs import Prompt
from halfbyte.models.architecture import Architecture
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.train.ray.pieces import Piece

__all__ = ["Bundle", "Hello", "Played", "WorkerSpec"]


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker needs beside the store; the model's folder need not exist on its machine.

    Arguments:
        config: of the run, as JSON.
        architecture: of the model. tokenizer: name -> content of the model's files beside its weights.
        longest: tokens of a sequence. prompt_limit: tokens of a prompt.
        store: address of the run's refit store. headers: for it, where it is HTTP. run: the store's run.
        release: version of halfbyte.
    """

    config: dict[str, Any]
    architecture: Architecture
    tokenizer: dict[str, bytes]
    longest: int
    prompt_limit: int | None
    store: str
    headers: dict[str, str]
    run: str
    release: str


@dataclass(frozen=True)
class Bundle:
    """Pieces of jobs that are played alike, for one worker.

    Arguments:
        pieces: what is to be played. prompts, keys: of each piece.
        sampling, recorded: of their jobs.
        version: the weights to play by, at least.
        guidance: what is recorded, a ``Plan`` as JSON.
    """

    pieces: tuple[Piece, ...]
    prompts: tuple[Prompt, ...]
    keys: tuple[int, ...]
    sampling: SamplingParams
    recorded: bool
    version: int
    guidance: list[list[Any]]


@dataclass(frozen=True)
class Hello:
    """Who a worker is."""

    node: str
    pid: int
    version: int
    kernels: str


@dataclass(frozen=True)
class Played:
    """What a worker brings back.

    Arguments:
        by_piece: finished and scored trajectories, in the order of the bundle's pieces.
        seconds: it took. tokens: it drew.
        fetched_bytes, refit_seconds, refits: that its weights have cost since it started.
    """

    by_piece: list[list[Trajectory]] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    fetched_bytes: int = 0
    refit_seconds: float = 0.0
    refits: int = 0
