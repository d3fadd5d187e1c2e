"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11, "Parallel random numbers: as easy as 1, 2, 3").

A sample's randomness is a pure function of (seed, request key, sample index, position), so it does not depend on which
requests share its batch, on their order, or on how often the engine was restarted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["philox4x32", "uniform"]

U32 = np.uint64(0xFFFFFFFF)
SHIFT = np.uint64(32)
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
Words = npt.NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words], rounds: int = 10) -> list[Words]:
    """The four 32-bit outputs (held in uint64 arrays) for arrays of counters and keys (32-bit words in uint64 arrays)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(rounds):
        if i:
            k0, k1 = (k0 + WEYL[0]) & U32, (k1 + WEYL[1]) & U32
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> SHIFT) ^ c1 ^ k0, p1 & U32, (p0 >> SHIFT) ^ c3 ^ k1, p0 & U32
    return [c0, c1, c2, c3]


def uniform(
    seeds: npt.NDArray[np.uint64],
    keys: npt.NDArray[np.uint64],
    samples: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.uint64],
) -> npt.NDArray[np.float64]:
    """Uniform doubles in [0, 1) with 53 random bits, one for every (seed, request key, sample, position); all [S] uint64."""
    counter = (positions & U32, samples & U32, keys & U32, keys >> SHIFT)
    a, b, _, _ = philox4x32(counter, (seeds & U32, seeds >> SHIFT))
    return ((a >> np.uint64(5)) * 67108864.0 + (b >> np.uint64(6))) * (1.0 / 9007199254740992.0)
