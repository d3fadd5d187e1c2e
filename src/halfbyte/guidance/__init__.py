"""Guidance: what the rollout's rounding tells the learner's (TRACE, arXiv 2610.07767)."""

from halfbyte.guidance.payload import Payload, check_spec, payload_bytes, payload_of, record
from halfbyte.guidance.rounding import (
    HARD_REPLAY,
    METHODS,
    SCALE_ONLY,
    TRACE,
    RoundingMethod,
    guided_round,
    parse_method,
)

__all__ = [
    "HARD_REPLAY",
    "METHODS",
    "SCALE_ONLY",
    "TRACE",
    "Payload",
    "RoundingMethod",
    "check_spec",
    "guided_round",
    "parse_method",
    "payload_bytes",
    "payload_of",
    "record",
]
