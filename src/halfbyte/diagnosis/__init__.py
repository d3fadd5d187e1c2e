"""Diagnosis of a rollout batch from any trainer: the sign structure of the mismatch, in numbers and pictures."""

from __future__ import annotations

from halfbyte.diagnosis.columns import ALIASES, find_columns, parse_columns
from halfbyte.diagnosis.readers import read_tables
from halfbyte.diagnosis.tokens import TokenTable, table_of

__all__ = ["ALIASES", "TokenTable", "find_columns", "parse_columns", "read_tables", "table_of"]
