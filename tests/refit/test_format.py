"""The format page: golden files, and a second reader written from the page alone."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from refit_format import DTYPES, GOLDEN, golden_weights, read_delta

from halfbyte.refit.arrays import DTYPE_BITS
from halfbyte.refit.codec import BlockKind, Coding, TensorDelta, apply, available, decode, encode, kernels
from halfbyte.refit.codec.delta import ROW
from halfbyte.refit.codec.element import ELEMENTS
from halfbyte.refit.codec.kernels import Classed, Marked
from halfbyte.refit.objects import read_object

FILES = sorted(GOLDEN.glob("*.safetensors"))
PAGE = Path(__file__).parents[2] / "docs" / "refit-format.md"
DTYPE_OF = {"bf16": "BF16", "f32": "F32", "f8_e4m3": "F8_E4M3", "f4": "F4"}


def streams(body: object) -> list[bytes]:
    if isinstance(body, Marked):
        return [body.where.tobytes(), body.values.tobytes(), body.wide.tobytes()]
    if isinstance(body, Classed):
        return [part.tobytes() for part in (body.quotients, body.values, body.wide, body.low)]
    return [] if body is None else [np.asarray(body).tobytes()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("profile", ["fast", "max"])
def test_golden_files_are_read_and_written_again(path: Path, profile: str) -> None:
    """What zstd makes of a stream may change with its version; the streams, the table and the result may not."""
    entries, dtype = read_object(path.read_bytes()), DTYPE_OF[path.stem]
    base, target, golden = entries["base"], entries["target"], TensorDelta.from_bytes(entries[profile])
    assert (base.tobytes(), target.tobytes()) == golden_weights(dtype, DTYPE_BITS[dtype])
    assert read_delta(entries[profile].tobytes(), base.tobytes()) == target.tobytes()
    for name in available():
        use, data = kernels(name), base.copy()
        assert apply(dtype, data, golden, with_kernels=use).damaged == ()
        assert data.tobytes() == target.tobytes()
        made = encode(dtype, base, target, profile, block=1024, with_kernels=use)  # type: ignore[arg-type]
        for field in ("kind", "coding", "changed", "raw", "base", "target"):
            assert made.table[field].tolist() == golden.table[field].tolist()
        assert [streams(body) for body in decode(made)] == [streams(body) for body in decode(golden)]


def test_the_golden_files_have_every_kind_and_coding() -> None:
    kinds, codings = set(), set()
    for path in FILES:
        for profile in ("fast", "max"):
            table = TensorDelta.from_bytes(read_object(path.read_bytes())[profile]).table
            kinds |= set(table["kind"].tolist())
            codings |= set(table["coding"].tolist())
    assert kinds == {int(kind) for kind in BlockKind}
    assert codings == {int(coding) for coding in Coding}


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
@pytest.mark.parametrize("profile", ["fast", "max"])
def test_the_second_reader_agrees(dtype: str, profile: str) -> None:
    rng = np.random.default_rng(len(dtype))
    for density in (0.0, 0.01, 0.1, 0.4, 1.0):
        base = rng.integers(0, 256, 2000, dtype=np.uint8)
        target = np.where(rng.random(2000) < density, base + rng.integers(0, 3, 2000, dtype=np.uint8), base)
        delta = encode(dtype, base, target, profile, block=256)  # type: ignore[arg-type]
        assert read_delta(delta.to_bytes(), base.tobytes()) == target.tobytes()


def test_the_page_has_the_numbers_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    cells = [
        [cell.strip(" `") for cell in line.strip("| ").split("|")]
        for line in page.splitlines()
        if line.startswith("| ")
    ]
    listed = {row[0]: row[1:] for row in cells}
    for name, element in ELEMENTS.items():
        assert listed[name][:2] == [str(element.code), str(element.bits)], name
        assert listed[name][2] == ("sign and magnitude" if element.signed_magnitude else "as they are")
        shift, width = element.exponent
        assert listed[name][3] == (f"{shift} to {shift + width - 1}" if width else "none")
        assert DTYPES[element.code] == (element.bits, element.signed_magnitude, shift, width)
    for kind in BlockKind:
        assert listed[kind.name.lower()][0] == str(int(kind))
    assert struct.calcsize("<4sBBBBQQQ") == 32
    assert ROW.itemsize == 56
    for size in ("32 bytes", "56 bytes"):
        assert re.search(size, page)
