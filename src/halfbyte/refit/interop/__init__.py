"""Deltas of other systems: the HF-index layout (slime, miles, SGLang, ModelExpress), read and written; Fireworks arc_v1 and
arc_v2, read. Both are relative and carry no digest of their base: a wrong base is found by the target's checksum, before
anything is handed on. Payloads that hold a pickle are refused by name.
"""

from halfbyte.refit.interop.arc import read_arc
from halfbyte.refit.interop.hf_index import DeltaIndex, read_index, read_index_delta, write_index_delta

__all__ = ["DeltaIndex", "read_arc", "read_index", "read_index_delta", "write_index_delta"]
