"""Rows of guidance: parts stored at slots, codes read out of pages; against loops over single bytes and the quantiser."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ConfigError, ShapeError
from halfbyte.formats import get_spec, payload_of, quantise
from halfbyte.formats.residues import PayloadBits
from halfbyte.kernels import Kernels, available, get

NAMES = [name for name in available() if name != "native"]
SPEC = get_spec("halfbyte_kv")


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return get(request.param)


@settings(deadline=None, max_examples=25)
@given(
    name=st.sampled_from(NAMES),
    tokens=st.integers(0, 40),
    widths=st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=5),
    gap=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_parts_lie_where_they_were_put_and_nothing_else_changes(
    name: str, tokens: int, widths: list[tuple[int, bool]], gap: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (50, sum(w + gap for w, _ in widths) + gap), generator=g).byte()
    slots = torch.randperm(50, generator=g)[:tokens]
    parts, start = [], gap
    expected = [list(row) for row in rows.tolist()]
    for width, exponents in widths:
        powers = torch.randint(-126, 128, (tokens, width), generator=g)
        source = powers.float().exp2() if exponents else torch.randint(0, 256, (tokens, width), generator=g).byte()
        for t, slot in enumerate(slots.tolist()):
            for i in range(width):
                expected[slot][start + i] = int(powers[t, i]) + 127 if exponents else int(source[t, i])
        parts.append((source, start))
        start += width + gap
    get(name).store_parts(rows, slots, parts)
    assert rows.tolist() == expected


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize(("n_kv", "dim", "page_size"), [(1, 16, 16), (2, 32, 32), (3, 80, 48)])
def test_pages_give_back_the_payload_of_what_was_stored(
    kernels: Kernels, n_kv: int, dim: int, page_size: int, part: str, bits: PayloadBits
) -> None:
    g = torch.Generator().manual_seed(dim)
    layer = kernels.new_kv_layer(5, page_size, n_kv, dim, "fp4", SPEC)
    slots = torch.randperm(5 * page_size, generator=g)
    k, v = (torch.randn(len(slots), n_kv, dim, generator=g) * 3 for _ in "kv")
    kernels.store_kv(layer, k, v, slots)
    payload = payload_of(quantise(k if part == "k" else v, SPEC), bits)
    wanted = torch.cat([payload.codes.flatten(1), payload.scales.flatten(1)], dim=1)
    read = torch.randint(0, len(slots), (37,), generator=g)  # in any order, some of them twice
    rows = torch.full((37, wanted.shape[1] + 5), 7, dtype=torch.uint8)
    kernels.read_kv(layer, part, slots[read], bits, rows, 2)  # type: ignore[arg-type]
    assert torch.equal(rows[:, 2:-3], wanted[read])
    assert bool((rows[:, :2] == 7).all() & (rows[:, -3:] == 7).all())


def test_what_does_not_fit_is_refused_before_anything_is_written(kernels: Kernels) -> None:
    rows, slots = torch.zeros(4, 8, dtype=torch.uint8), torch.tensor([1, 3])
    part = torch.ones(2, 4, dtype=torch.uint8)
    for bad_slots, source, start in (
        (torch.tensor([1, 4]), part, 0),
        (torch.tensor([-1, 2]), part, 0),
        (slots, part, 5),
        (slots, part, -1),
        (slots, part[:1], 0),
        (slots, part.to(torch.int32), 0),
        (slots.to(torch.int32), part, 0),
    ):
        with pytest.raises(ShapeError):
            kernels.store_parts(rows, bad_slots, [(part[: len(bad_slots)], 0), (source, start)])
    assert not bool(rows.any())


def test_reading_refuses_other_layers_slots_and_rows(kernels: Kernels) -> None:
    layer = kernels.new_kv_layer(2, 16, 1, 16, "fp4", SPEC)
    rows, slots = torch.zeros(2, 9, dtype=torch.uint8), torch.tensor([0, 31])
    kernels.read_kv(layer, "k", slots, 4, rows, 0)
    with pytest.raises(ShapeError):
        kernels.read_kv(layer, "k", slots, 4, rows, 1)
    with pytest.raises(ShapeError):
        kernels.read_kv(layer, "k", torch.tensor([0]), 4, rows, 0)
    with pytest.raises(ShapeError):
        kernels.read_kv(layer, "k", torch.tensor([0, 32]), 4, rows, 0)
    with pytest.raises(ConfigError):
        kernels.read_kv(kernels.new_kv_layer(2, 16, 1, 16, "bf16"), "k", slots, 4, rows, 0)
