"""The codec: from two flattened tensors to a :class:`TensorDelta`, and from a delta and the base to the target.

    delta = encode(dtype, base, target)                 # publisher
    prepared = prepare(dtype, data, delta)              # subscriber, while the engine still serves
    if not prepared.damaged:
        undo = commit(prepared, data).undo              # paused
    revert(data, undo)                                  # if another rank failed

``apply`` is prepare and commit in one pass. Everything is per tensor and holds no state, so threads may share the work.
"""

from halfbyte.refit.codec.apply import Applied, BlockUndo, Undo, apply, commit, revert
from halfbyte.refit.codec.blocks import BLOCK, Hashes, block_count, block_hash, block_hashes, block_span
from halfbyte.refit.codec.delta import BlockKind, Coding, TensorDelta
from halfbyte.refit.codec.encode import Profile, encode
from halfbyte.refit.codec.join import joined, whole_blocks
from halfbyte.refit.codec.prepare import BlockState, Prepared, decode, prepare
from halfbyte.refit.codec.registry import available, kernels

__all__ = [
    "BLOCK",
    "Applied",
    "BlockKind",
    "BlockState",
    "BlockUndo",
    "Coding",
    "Hashes",
    "Prepared",
    "Profile",
    "TensorDelta",
    "Undo",
    "apply",
    "available",
    "block_count",
    "block_hash",
    "block_hashes",
    "block_span",
    "commit",
    "decode",
    "encode",
    "joined",
    "kernels",
    "prepare",
    "revert",
    "whole_blocks",
]
