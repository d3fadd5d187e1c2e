"""What a refit will cost before it is run: bytes and seconds by phase, beside sending every weight.

The model is a sum of phases, each a size divided by a rate, with the sizes and rates in the open; ``halfbyte bench refit``
measures the rates, and a test holds the prediction against real refits over a throttled link.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from halfbyte.errors import ConfigError

__all__ = ["CROSS_REGION", "Cost", "Scenario", "bytes_per_change", "over_rates", "plan"]

Profile = Literal["fast", "max"]

#: Bytes a changed weight costs: a share of the entropy of independent positions (exponent classes of ``max`` know more), plus its
#: value. Fitted to the synthetic traces of ``halfbyte refit bench``, 1 to 25% changed; within 3% there.
POSITION_AND_VALUE = {"fast": (0.866, 0.392), "max": (0.499, 0.443)}
ELEMENT_BYTES = 2  # BF16
#: Bytes a changed tensor costs beside that: headers of its streams. Measured on the shipped policy (69 tensors of 32 KiB and
#: less), where it is a fifth of a delta; of tensors of megabytes it is nothing.
TENSOR_BYTES = 200


@dataclass(frozen=True)
class Scenario:
    """What is to be sent where.

    Arguments:
        parameters: weights of the model, each of ``ELEMENT_BYTES`` bytes in the checkpoint.
        change_rate: share of weights with a changed bit, 0 to 1.
        link: bytes per second of the narrowest link between the trainer's store and the ranks.
        ranks: receivers. Each holds and patches its own share of the weights.
        copies: how often the bytes cross that link: 1 with a store or cache on the far side, ``ranks`` without.
        profile: codec profile.
        encode_threads: publisher threads.
        encode_rate, apply_rate: BF16-equivalent bytes a second and thread (apply: of one rank, verification included).
        hash_rate: bytes a second of one rank that reads and hashes a full copy.
        latency: seconds of one store operation.
        operations: store operations one after the other in a refit (pointer, manifest, objects, acknowledgement).
        pause: seconds that a commit stops the engine.
        tensors: that the weights are cut into, all of them changed; 0 leaves their headers out.
    """

    parameters: float
    change_rate: float
    link: float
    ranks: int = 1
    copies: int = 1
    profile: Profile = "fast"
    encode_threads: int = 1
    encode_rate: float = 6e9
    apply_rate: float = 10e9
    hash_rate: float = 2e9
    latency: float = 0.05
    operations: int = 8
    pause: float = 0.1
    tensors: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "profile":
                if value not in POSITION_AND_VALUE:
                    raise ConfigError(f"unknown profile {value!r}", where="profile", expected="fast or max")
                continue
            floor = 0.0 if f.name in ("change_rate", "latency", "operations", "pause", "tensors") else None
            if not math.isfinite(value) or value < 0 or (floor is None and value <= 0):
                raise ConfigError(f"{f.name} is {value}", where=f.name, expected="a positive number")
        if self.change_rate > 1:
            raise ConfigError(
                f"change_rate is {self.change_rate}",
                where="change_rate",
                expected="a share from 0 to 1",
                fix="3% is 0.03",
            )


#: The cross-region case of arXiv 2610.08430: 1T parameters, 87.5 minutes to send all of them, 3% changed. The link rate
#: follows from the two; rank and thread counts are assumptions.
CROSS_REGION = Scenario(parameters=1e12, change_rate=0.03, link=2e12 / (87.5 * 60), ranks=64, encode_threads=64)


@dataclass(frozen=True)
class Cost:
    """Bytes over the link, and seconds by phase; phases follow one another."""

    scenario: Scenario
    full_bytes: float
    delta_bytes: float
    full_seconds: dict[str, float]
    delta_seconds: dict[str, float]

    @property
    def full_total(self) -> float:
        """Seconds of a full transfer."""
        return sum(self.full_seconds.values())

    @property
    def delta_total(self) -> float:
        """Seconds of the delta refit."""
        return sum(self.delta_seconds.values())

    @property
    def speedup(self) -> float:
        """How many times sooner the ranks serve the new version."""
        return self.full_total / self.delta_total

    @property
    def compared(self) -> str:
        """The delta beside a full transfer, in words."""
        return f"{self.speedup:.1f} times sooner" if self.speedup >= 1 else f"{1 / self.speedup:.1f} times later"

    def to_json(self) -> dict[str, Any]:
        """One JSON object."""
        return asdict(self) | {
            "full_total": self.full_total,
            "delta_total": self.delta_total,
            "speedup": self.speedup,
        }


def bytes_per_change(change_rate: float, profile: Profile = "fast") -> float:
    """Bytes that a changed BF16 weight costs at this change rate.

    Linear in the entropy of independent positions, H(p) / p bits (``POSITION_AND_VALUE``); never more than what the density
    guard lets through (all of the block). 0 where nothing changed.
    """
    p = change_rate
    if p <= 0:
        return 0.0
    entropy = 0.0 if p >= 1 else (-p * math.log2(p) - (1 - p) * math.log2(1 - p)) / p
    share, value = POSITION_AND_VALUE[profile]
    return min(share * entropy / 8 + value, ELEMENT_BYTES / p)


def plan(scenario: Scenario) -> Cost:
    """Sizes over rates: compare and encode, upload and download over the link, decode and apply, commit."""
    s = scenario
    total = s.parameters * ELEMENT_BYTES
    delta = s.parameters * s.change_rate * bytes_per_change(s.change_rate, s.profile)
    if s.change_rate:
        delta += s.tensors * TENSOR_BYTES
    store = s.latency * s.operations
    return Cost(
        scenario=s,
        full_bytes=total * s.copies,
        delta_bytes=delta * s.copies,
        full_seconds={
            "transfer": total * s.copies / s.link,
            "store": store,
            "load": total / s.ranks / s.hash_rate,
        },
        delta_seconds={
            "encode": total / (s.encode_rate * s.encode_threads),
            "transfer": delta * s.copies / s.link,
            "store": store,
            "apply": total / s.ranks / s.apply_rate,
            "pause": s.pause,
        },
    )


def over_rates(scenario: Scenario, rates: tuple[float, ...] = (0.01, 0.03, 0.05, 0.1, 0.25, 0.5)) -> list[Cost]:
    """The same scenario at several change rates."""
    return [plan(replace(scenario, change_rate=rate)) for rate in rates]
