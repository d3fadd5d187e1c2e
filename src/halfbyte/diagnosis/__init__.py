"""Diagnosis of a rollout batch from any trainer: the sign structure of the mismatch, in numbers and pictures."""

from __future__ import annotations

from halfbyte.diagnosis.columns import ALIASES, find_columns, parse_columns
from halfbyte.diagnosis.diagnose import CorrectionEffect, Diagnosis, diagnose
from halfbyte.diagnosis.readers import read_tables
from halfbyte.diagnosis.segmentation import segmentation
from halfbyte.diagnosis.tokens import TokenTable, table_of

__all__ = [
    "ALIASES",
    "CorrectionEffect",
    "Diagnosis",
    "TokenTable",
    "diagnose",
    "find_columns",
    "parse_columns",
    "read_tables",
    "segmentation",
    "table_of",
]
