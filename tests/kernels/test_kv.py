"""Pages of keys and values: layout round trips, sizes, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import ConfigError, NumericsError, ShapeError
from halfbyte.formats import get_spec, quantise
from halfbyte.kernels import Kernels, available, get
from halfbyte.kernels.kv import KvLayer

NAMES = [name for name in available() if name != "native"]
KINDS = ("fp32", "bf16", "fp4")
SPEC = get_spec("halfbyte_kv")


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return get(request.param)


def new_layer(
    kernels: Kernels, kind: str, *, pages: int = 5, page_size: int = 32, n_kv: int = 2, d: int = 32
) -> KvLayer:
    return kernels.new_kv_layer(pages, page_size, n_kv, d, kind, SPEC if kind == "fp4" else None)  # type: ignore[arg-type]


def arrays(layer: KvLayer) -> list[torch.Tensor]:
    return [t for t in (layer.k, layer.v, layer.k_scales, layer.v_scales) if t is not None]


def seen(x: torch.Tensor, kind: str) -> torch.Tensor:
    """What a stored number reads back as."""
    if kind == "fp4":
        return quantise(x, SPEC).dequantise()
    return x if kind == "fp32" else x.bfloat16().float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [16, 32, 48, 64, 80, 128, 256])
def test_tokens_read_back_as_stored(kernels: Kernels, kind: str, d: int) -> None:
    g = torch.Generator().manual_seed(d)
    layer = new_layer(kernels, kind, d=d)
    slots = torch.randperm(5 * 32, generator=g)[:70]
    k, v = torch.randn(70, 2, d, generator=g), torch.randn(70, 2, d, generator=g) * 3
    kernels.store_kv(layer, k[:50], v[:50], slots[:50])
    kernels.store_kv(layer, k[50:], v[50:], slots[50:])
    got_k, got_v = layer.read(slots)
    assert torch.equal(got_k, seen(k, kind))
    assert torch.equal(got_v, seen(v, kind))
    rest = torch.tensor(sorted(set(range(160)) - set(slots.tolist())))
    assert not bool(torch.cat(layer.read(rest)).any()), "storing touched other slots"


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(KINDS),
    st.sampled_from([16, 32, 48, 64, 128]),
    st.integers(1, 3),
    st.integers(0, 60),
    st.integers(0, 2**31),
)
def test_implementations_write_the_same_bytes(kind: str, d: int, n_kv: int, count: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    slots = torch.randperm(96, generator=g)[:count]
    first = (torch.randn(count, n_kv, d, generator=g), torch.randn(count, n_kv, d, generator=g))
    second = (torch.randn(count // 2, n_kv, d, generator=g), torch.randn(count // 2, n_kv, d, generator=g))
    written = []
    for name in NAMES:
        layer = new_layer(get(name), kind, pages=3, n_kv=n_kv, d=d)
        get(name).store_kv(layer, *first, slots)
        get(name).store_kv(layer, *second, slots[: count // 2])  # overwrites
        written.append(arrays(layer))
    for other in written[1:]:
        assert all(torch.equal(a, b) for a, b in zip(written[0], other))


def test_one_token_at_a_time_writes_the_same_bytes(kernels: Kernels) -> None:
    g = torch.Generator().manual_seed(3)
    k, v = torch.randn(40, 2, 32, generator=g), torch.randn(40, 2, 32, generator=g)
    slots = torch.arange(7, 47)
    together, apart = new_layer(kernels, "fp4"), new_layer(kernels, "fp4")
    kernels.store_kv(together, k, v, slots)
    for t in range(40):
        kernels.store_kv(apart, k[t : t + 1], v[t : t + 1], slots[t : t + 1])
    assert all(torch.equal(a, b) for a, b in zip(arrays(together), arrays(apart)))


def test_codes_and_scales_in_plain_order_are_those_of_the_quantiser(kernels: Kernels) -> None:
    g = torch.Generator().manual_seed(4)
    k, v = torch.randn(30, 2, 64, generator=g), torch.randn(30, 2, 64, generator=g)
    layer = new_layer(kernels, "fp4", d=64)
    slots = torch.randperm(160, generator=g)[:30]
    kernels.store_kv(layer, k, v, slots)
    for stored, x in zip(layer.quantised(slots), (k, v)):
        fresh = quantise(x, SPEC)
        assert torch.equal(stored.codes, fresh.codes)
        assert torch.equal(stored.scales, fresh.scales)
        assert stored.global_scale.item() == 0.125
        assert stored.spec == SPEC
        assert stored.shape == (30, 2, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_copy_pages_copies_whole_pages_at_once(kernels: Kernels, kind: str) -> None:
    g = torch.Generator().manual_seed(5)
    layer = new_layer(kernels, kind)
    kernels.store_kv(
        layer, torch.randn(160, 2, 32, generator=g), torch.randn(160, 2, 32, generator=g), torch.arange(160)
    )
    before = torch.cat(layer.read(torch.arange(160)), 1).unflatten(0, (5, 32))
    kernels.copy_pages(layer, [1, 4, 1], [4, 0, 2])  # page 4 is read before it is written
    after = torch.cat(layer.read(torch.arange(160)), 1).unflatten(0, (5, 32))
    assert torch.equal(after, before[torch.tensor([4, 1, 1, 3, 1])])
    kernels.copy_pages(layer, [], [])
    assert torch.equal(torch.cat(layer.read(torch.arange(160)), 1).unflatten(0, (5, 32)), after)
    for src, dst in (([7], [0]), ([0], [5]), ([-1], [0]), ([0, 1], [2]), ([0, 1], [2, 2])):
        with pytest.raises(ShapeError, match="copy_pages"):
            kernels.copy_pages(layer, src, dst)


def test_sizes(kernels: Kernels) -> None:
    for kind, expected in (("fp32", 1024), ("bf16", 512), ("fp4", 144)):
        layer = new_layer(kernels, kind, pages=4, page_size=16, d=64)
        assert layer.nbytes_per_token == expected
        assert layer.nbytes == 4 * 16 * expected == sum(t.numel() * t.element_size() for t in arrays(layer))
    assert 512 / 144 >= 3.5, "FP4 pages must hold at least 3.5 times the tokens of BF16 pages"


def test_an_empty_layer_and_an_empty_store(kernels: Kernels) -> None:
    layer = new_layer(kernels, "fp4", pages=0)
    kernels.store_kv(layer, torch.zeros(0, 2, 32), torch.zeros(0, 2, 32), torch.zeros(0, dtype=torch.int64))
    assert layer.nbytes == 0
    assert layer.read(torch.zeros(0, dtype=torch.int64))[0].shape == (0, 2, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_stores_are_refused_and_write_nothing(kernels: Kernels, kind: str) -> None:
    layer = new_layer(kernels, kind)
    good = torch.ones(2, 2, 32)
    for value in (float("nan"), float("inf"), -float("inf")):
        bad = good.clone()
        bad[1, 1, 7] = value
        with pytest.raises(NumericsError, match="row 1"):
            kernels.store_kv(layer, bad, good, torch.tensor([0, 1]))
        with pytest.raises(NumericsError, match="row 1"):
            kernels.store_kv(layer, good, bad, torch.tensor([0, 1]))
    with pytest.raises(ShapeError, match="160"):
        kernels.store_kv(layer, good, good, torch.tensor([0, 160]))
    with pytest.raises(ShapeError, match="-1"):
        kernels.store_kv(layer, good, good, torch.tensor([0, -1]))
    with pytest.raises(ShapeError, match="twice"):
        kernels.store_kv(layer, good, good, torch.tensor([5, 5]))
    with pytest.raises(ShapeError, match=r"\(2, 2, 16\)"):
        kernels.store_kv(layer, torch.ones(2, 2, 16), good, torch.tensor([0, 1]))
    assert not any(bool(t.any()) for t in arrays(layer))


def test_layers_that_cannot_exist_are_refused(kernels: Kernels) -> None:
    with pytest.raises(ShapeError, match="24"):
        kernels.new_kv_layer(2, 24, 2, 32, "bf16")
    with pytest.raises(ShapeError, match="head_dim 24"):
        kernels.new_kv_layer(2, 16, 2, 24, "fp4", SPEC)
    with pytest.raises(ConfigError, match="fp8"):
        kernels.new_kv_layer(2, 16, 2, 32, "fp8")  # type: ignore[arg-type]
    for spec in (None, get_spec("halfbyte"), get_spec("halfbyte_token")):
        with pytest.raises(ConfigError, match="QuantSpec"):
            kernels.new_kv_layer(2, 16, 2, 32, "fp4", spec)
    with pytest.raises(ConfigError, match="bf16"):
        kernels.new_kv_layer(2, 16, 2, 32, "bf16").quantised(torch.tensor([0]))


def test_values_beyond_the_range_saturate_and_stay_finite(kernels: Kernels) -> None:
    # ModelOpt #1633: scales above 448 must saturate. The constant global scale 0.125 reaches 6 * 448 / 8 = 336.
    layer = new_layer(kernels, "fp4")
    big = torch.full((1, 2, 32), 1e6)
    kernels.store_kv(layer, big, -big, torch.tensor([3]))
    k, v = layer.read(torch.tensor([3]))
    assert bool((k == 336).all())
    assert bool((v == -336).all())
