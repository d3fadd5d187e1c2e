"""What a trial records: one :class:`Record` a request, what statistics need of a task, and the usage of an arm.

All are frozen, go to JSON and back, and refuse fields that are unknown, missing or of another type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self, TypeAlias

from pydantic import ConfigDict, TypeAdapter, ValidationError

from halfbyte.errors import DataError
from halfbyte.trial.canonical import canonical

__all__ = ["ARMS", "Arm", "ArmUsage", "Phase", "Record", "Strict", "TaskInfo", "other"]

Arm: TypeAlias = Literal["baseline", "candidate"]
Phase: TypeAlias = Literal["pilot", "run"]
ARMS: tuple[Arm, Arm] = ("baseline", "candidate")


def other(arm: Arm) -> Arm:
    """The arm that ``arm`` is compared with."""
    return "candidate" if arm == "baseline" else "baseline"


@lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class Strict:
    """JSON in, JSON out, for frozen dataclasses."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def to_json(self) -> dict[str, Any]:
        """Every field, JSON types only (tuples stay tuples until written)."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "record") -> Self:
        """The object that :meth:`to_json` described.

        Raises:
            DataError: a field that is unknown, missing or of another type; all are named.
        """
        try:
            kind: Any = cls
            return _adapter(kind).validate_json(canonical(dict(data)))  # type: ignore[no-any-return]
        except ValidationError as error:
            found = [f"{'.'.join(map(str, e['loc']))}: {_says(e['type'], e['msg'])}" for e in error.errors()]
            raise DataError(f"not a {cls.__name__}: {'; '.join(found)}", where=where) from error
        except (TypeError, ValueError) as error:
            raise DataError(f"not a {cls.__name__}: {error}", where=where) from error


def _says(kind: str, message: str) -> str:
    known = {"unexpected_keyword_argument": "unknown field", "missing": "is missing"}
    return known.get(kind, f"{message[0].lower()}{message[1:]}")


@dataclass(frozen=True)
class Record(Strict):
    """One request and what came of it.

    Arguments:
        phase: of the A/A pilot, or of the run.
        block: number of the counterbalanced block, from 0.
        position: place of the request in the block's plan, from 0; unique within the block.
        arm: in the pilot both arms are the baseline's server ("baseline" the first copy, "candidate" the second).
        task: id of the task.
        repeat: of this task in this arm, from 0.
        seed: sampling seed that was sent, the same in both arms of a pair.
        started: Unix time, seconds.
        ttft: seconds to the first token; None where nothing came, or without streaming.
        latency: seconds to the end of the response, or to the failure.
        prompt_tokens, completion_tokens, cached_tokens: as the server's usage says; None where it says nothing.
        finish_reason: the server's.
        text: response text; "" where the request failed.
        calls: the server's tool calls, a JSON array of {name, arguments (text)}; "" for none.
        tool_calls: tool calls that could be parsed, there or in the text; None where the task offers no tools.
        passed: the scorer's verdict; None where the request failed, or the scorer did.
        score: the scorer's number.
        error: None, or the class of the failure and its detail: ``http 500: ...``, ``timeout``, ``connection: ...``,
            ``truncated stream``, ``bad json: ...``, ``scorer: ...``.
        attempts: tries, 1 unless [run] retries allows more.
        request_sha256: of the canonical JSON body without the model's name; equal in both arms of a pair.
        response_sha256: of [text, calls, finish reason].
    """

    phase: Phase
    block: int
    position: int
    arm: Arm
    task: str
    repeat: int
    seed: int
    started: float
    ttft: float | None
    latency: float
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    finish_reason: str | None
    text: str
    calls: str
    tool_calls: int | None
    passed: bool | None
    score: float | None
    error: str | None
    attempts: int
    request_sha256: str
    response_sha256: str

    @property
    def failure(self) -> str | None:
        """The class of the failure without its detail (``http 500``, ``timeout``...), or None."""
        return None if self.error is None else self.error.partition(":")[0]


@dataclass(frozen=True)
class TaskInfo(Strict):
    """What statistics need of a task.

    Arguments:
        critical: newly failing it counts against [limits] critical.
        tags: for tables by tag.
        tools: the task offers tools, so its tool calls are counted.
    """

    id: str
    critical: bool
    tags: tuple[str, ...]
    tools: bool


@dataclass(frozen=True)
class ArmUsage(Strict):
    """What an arm used, from blocks.jsonl.

    Arguments:
        seconds: wall time of its segments (requests in flight; starts of servers are not counted).
        weights_bytes, kv_bytes, peak_bytes: None where nobody can know (a remote server): "cannot claim memory".
        kv_capacity_tokens: of the KV pool.
        source: "engine metrics + PSS", "PSS", "engine metrics + NVML", "NVML", "remote".
    """

    arm: Arm
    seconds: float
    weights_bytes: int | None
    kv_bytes: int | None
    peak_bytes: int | None
    kv_capacity_tokens: int | None
    source: str
