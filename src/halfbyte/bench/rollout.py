"""``halfbyte bench rollout``: decode tokens a second of several decoders that take turns, and what their weights hold."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from halfbyte.bench.decoders import Decoder, EngineDecoder, TransformersDecoder
from halfbyte.bench.memory import MemoryRow, resident
from halfbyte.bench.random_moe import RandomTensors, moe_architecture
from halfbyte.errors import ConfigError, MissingExtraError
from halfbyte.models.architecture import Architecture
from halfbyte.models.open_model import model_folder, open_model
from halfbyte.models.precision import Precision, precision_from

__all__ = ["Contest", "RolloutRow", "numbers", "open_contest", "open_random_moe", "race"]

#: Bytes that the weights of a model need at a precision (the prediction of ``halfbyte doctor``).
Predict = Callable[[Architecture, Precision], int]


@dataclass(frozen=True)
class RolloutRow:
    """A precision beside a baseline, at one batch size.

    Arguments:
        same_tokens: our engine drew the same tokens in every round (and the first sequence the same in every batch).
    """

    model: str
    precision: str
    batch: int
    tokens_per_second: float
    tokens_per_second_quartiles: tuple[float, float]
    baseline: str
    baseline_tokens_per_second: float
    baseline_tokens_per_second_quartiles: tuple[float, float]
    rounds: int
    same_tokens: bool

    @property
    def ratio(self) -> float:
        """How many times the baseline's tokens a second, from the two medians."""
        return self.tokens_per_second / self.baseline_tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """One flat JSON object."""
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True)
class Contest:
    """Decoders of one model.

    Arguments:
        ours: precision -> our engine.
        other: transformers, or None.
        memory: resident weights of ours.
        notes: what is missing and why.
    """

    model: str
    vocab_size: int
    ours: Mapping[str, Decoder]
    other: Decoder | None
    memory: Sequence[MemoryRow]
    notes: Sequence[str]


def numbers(text: str, flag: str) -> list[int]:
    """Positive integers from a comma-separated list.

    Raises:
        ConfigError: anything else.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise ConfigError(f"{text!r} cannot be used", where=flag, expected="positive integers such as 1,16")
    return [int(word) for word in words]


def open_contest(model: str, precisions: Sequence[str], predict: Predict, *, batch: int, length: int) -> Contest:
    """Our engines at ``precisions`` and transformers, on one model folder.

    Arguments:
        batch, length: the most sequences and the longest one.
    Raises:
        UserError: the model or a precision cannot be used.
    """
    parsed = [precision_from(p) for p in precisions]
    checkpoint, _ = open_model(model)
    notes = []
    other: Decoder | None = None
    try:
        other = TransformersDecoder(model_folder(model))
    except MissingExtraError as error:
        notes.append(f"not compared with transformers: {error.what}; {error.fix}")
    tensors = dict(checkpoint.tensors)
    return _contest(model, checkpoint.architecture, parsed, tensors, predict, other, notes, batch, length)


def open_random_moe(predict: Predict, *, batch: int, length: int, architecture: Architecture | None = None) -> Contest:
    """Our W4A4 beside our BF16 on random experts; nobody else can run them from memory."""
    arch = architecture or moe_architecture()
    parsed = [precision_from(p) for p in ("bf16", "w4a4kv4", "w4a4kv4-head")]
    return _contest("random-moe", arch, parsed, RandomTensors(arch), predict, None, (), batch, length)


def _contest(
    model: str,
    arch: Architecture,
    precisions: Sequence[Precision],
    tensors: Mapping[str, Tensor],
    predict: Predict,
    other: Decoder | None,
    notes: Sequence[str],
    batch: int,
    length: int,
) -> Contest:
    if length > arch.max_positions:
        raise ConfigError(
            f"prompt and new tokens are {length} tokens", where=model, expected=f"at most {arch.max_positions}"
        )
    ours = {p.name: EngineDecoder(arch, p, tensors, batch=batch, length=length) for p in precisions}
    memory = [resident(model, d.engine.weights, predict(arch, d.engine.precision)) for d in ours.values()]
    return Contest(model, arch.vocab_size, ours, other, memory, notes)


def race(
    contest: Contest, batches: Sequence[int], *, prompt_tokens: int, new_tokens: int, repeats: int
) -> Iterator[RolloutRow]:
    """Rows of every precision beside our BF16 and beside transformers; the decoders take turns, round by round.

    Odd rounds run backwards; one short run of everybody is warm-up.

    Raises:
        ConfigError: fewer than two new tokens.
    """
    if new_tokens < 2:
        raise ConfigError(f"{new_tokens} new tokens", where="--tokens", expected="at least 2: the first is not timed")
    decoders = {**contest.ours, **({} if contest.other is None else {contest.other.name: contest.other})}
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(contest.vocab_size, (max(batches), prompt_tokens), generator=generator).tolist()
    firsts: dict[str, set[tuple[int, ...]]] = {name: set() for name in decoders}
    for batch in batches:
        speeds: dict[str, list[float]] = {name: [] for name in decoders}
        tokens: dict[str, set[tuple[tuple[int, ...], ...]]] = {name: set() for name in decoders}
        for decoder in decoders.values():
            decoder.decode(prompts[:batch], 2)
        for turn in range(repeats):
            for name in decoders if turn % 2 == 0 else reversed(decoders):
                decoded = decoders[name].decode(prompts[:batch], new_tokens)
                speeds[name].append(decoded.tokens_per_second)
                tokens[name].add(decoded.tokens)
                firsts[name].add(decoded.tokens[0])
        for name in contest.ours:
            for baseline in ("bf16", *([contest.other.name] if contest.other else [])):
                if baseline in speeds and baseline != name:
                    yield RolloutRow(
                        contest.model,
                        name,
                        batch,
                        statistics.median(speeds[name]),
                        _quartiles(speeds[name]),
                        f"halfbyte {baseline}" if baseline in contest.ours else baseline,
                        statistics.median(speeds[baseline]),
                        _quartiles(speeds[baseline]),
                        repeats,
                        len(tokens[name]) == 1 and len(firsts[name]) == 1,
                    )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
