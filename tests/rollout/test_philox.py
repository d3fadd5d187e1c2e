"""Philox4x32-10 against the known-answer vectors of Random123, and its use as a keyed uniform generator."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.rollout.philox import philox4x32, uniform

# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, output.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = [np.array([c], dtype=np.uint64) for c in counter]
    keys = [np.array([k], dtype=np.uint64) for k in key]
    got = philox4x32(tuple(words), tuple(keys))  # type: ignore[arg-type]
    assert tuple(int(w[0]) for w in got) == expected


def test_uniform_is_a_function_of_its_own_row_and_looks_uniform() -> None:
    n = 20_000
    columns = [np.arange(n, dtype=np.uint64) % np.uint64(m) for m in (3, 7, 11)]
    positions = np.arange(n, dtype=np.uint64)
    u = uniform(columns[0], columns[1], columns[2], positions)
    assert u.min() >= 0.0
    assert u.max() < 1.0
    row = [c[123:124] for c in (*columns, positions)]
    assert uniform(*row)[0] == u[123]
    counts = np.histogram(u, bins=50, range=(0, 1))[0]
    chi2 = float(((counts - n / 50) ** 2 / (n / 50)).sum())
    assert chi2 < 85.4  # 99.9% quantile with 49 degrees of freedom; the input is fixed
