"""Routed experts: native against reference bit for bit, an independent oracle, and their invariances."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halfbyte.errors import ConfigError, NumericsError, ShapeError
from halfbyte.formats import QuantTensor, get_spec, quantise
from halfbyte.kernels import Kernels, PackedExperts, available, get

NAMES = [name for name in available() if name != "native"]
NATIVE = [name for name in NAMES if name != "reference"]
KINDS = ("fp32", "bf16", "w4a16", "w4a4")
SPECS = {"weight_spec": get_spec("halfbyte"), "activation_spec": get_spec("halfbyte_token")}


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return get(request.param)


def pack(
    kernels: Kernels, gate_up: Tensor | QuantTensor, down: Tensor | QuantTensor, kind: str, **kw: object
) -> PackedExperts:
    return kernels.pack_experts(gate_up, down, kind, **{**SPECS, **kw})  # type: ignore[arg-type]


def weights(e: int, i: int, h: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(e, 2 * i, h, generator=g) * h**-0.5, torch.randn(e, h, i, generator=g) * i**-0.5


def routing(m: int, k: int, e: int, h: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, expert ids (ragged: some experts get none) and gates."""
    g = torch.Generator().manual_seed(seed)
    used = max(k, e - seed % 3)
    ids = [torch.randperm(used, generator=g)[:k] for _ in range(m)]
    table = torch.stack(ids).to(torch.int32) if ids else torch.empty(0, k, dtype=torch.int32)
    return torch.randn(m, h, generator=g), table, torch.rand(m, k, generator=g)


def by_linears(kernels: Kernels, x: Tensor, ids: Tensor, gates: Tensor, w: tuple[Tensor, Tensor], kind: str) -> Tensor:
    """The definition token by token from the library's linear and swiglu."""
    y = torch.zeros_like(x)
    for m in range(x.shape[0]):
        for j in range(ids.shape[1]):
            gate_up, down = (
                kernels.pack_linear(t[int(ids[m, j])], kind, **SPECS)  # type: ignore[arg-type]
                for t in w
            )
            part = kernels.linear(kernels.swiglu(kernels.linear(x[m : m + 1], gate_up)), down)
            y[m] = y[m] + gates[m, j] * part[0]
    return y


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(NATIVE or ["reference"]),
    st.sampled_from(KINDS),
    st.integers(0, 24),
    st.integers(1, 3),
    st.integers(3, 6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 10_000),
)
def test_native_equals_reference(name: str, kind: str, m: int, k: int, e: int, i: int, h: int, seed: int) -> None:
    w = weights(e, i * 16, h * 16, seed)
    x, ids, gates = routing(m, k, e, h * 16, seed)
    y = [n.experts(x, ids, gates, pack(n, *w, kind)) for n in (get("reference"), get(name))]
    assert y[0].shape == (m, h * 16)
    assert torch.equal(y[0], y[1])


@pytest.mark.parametrize("kind", KINDS)
def test_definition_by_linears(kernels: Kernels, kind: str) -> None:
    w = weights(5, 32, 48, 1)
    x, ids, gates = routing(7, 2, 5, 48, 1)
    assert torch.equal(
        kernels.experts(x, ids, gates, pack(kernels, *w, kind)), by_linears(kernels, x, ids, gates, w, kind)
    )


def test_against_float64(kernels: Kernels) -> None:
    w = weights(4, 64, 128, 2)
    x, ids, gates = routing(6, 2, 4, 128, 2)
    want = torch.zeros(6, 128, dtype=torch.float64)
    for m in range(6):
        for j in range(2):
            gate, up = (w[0][ids[m, j]].double() @ x[m].double()).chunk(2)
            want[m] += gates[m, j].double() * (w[1][ids[m, j]].double() @ (torch.nn.functional.silu(gate) * up))
    y = kernels.experts(x, ids, gates, pack(kernels, *w, "fp32"))
    assert (y - want).norm() <= 1e-6 * want.norm()
    # FP4 is coarse, but an expert, a gate or a layout mixed up would be far outside this.
    fp4 = kernels.experts(x, ids, gates, pack(kernels, *w, "w4a4"))
    assert (fp4 - want).norm() <= 0.3 * want.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_the_batch(kernels: Kernels, kind: str) -> None:
    w = pack(kernels, *weights(6, 32, 64, 3), kind)
    x, ids, gates = routing(33, 2, 6, 64, 3)
    y = kernels.experts(x, ids, gates, w)
    order = torch.randperm(33)
    assert torch.equal(kernels.experts(x[order], ids[order], gates[order], w), y[order])
    for m in (1, 2, 5, 17):
        assert torch.equal(kernels.experts(x[:m], ids[:m], gates[:m], w), y[:m])


@pytest.mark.skipif(not NATIVE, reason="the native kernels are not built here")
@pytest.mark.parametrize("kind", KINDS)
def test_thread_counts_agree(kind: str) -> None:
    from halfbyte.kernels import native

    kernels, before, results = get("native"), native.thread_count(), []
    w = pack(kernels, *weights(8, 96, 256, 4), kind)
    x, ids, gates = routing(19, 3, 8, 256, 4)
    try:
        for threads in (1, 2, 3, 7):
            native.set_thread_count(threads)
            results.append(kernels.experts(x, ids, gates, w))
    finally:
        native.set_thread_count(before)
    assert all(torch.equal(r, results[0]) for r in results)


def test_all_tokens_to_one_expert_and_repeated_slots(kernels: Kernels) -> None:
    w = weights(4, 16, 32, 5)
    x, _, gates = routing(20, 2, 4, 32, 5)
    ids = torch.full((20, 2), 3, dtype=torch.int32)
    assert torch.equal(
        kernels.experts(x, ids, gates, pack(kernels, *w, "w4a4")), by_linears(kernels, x, ids, gates, w, "w4a4")
    )


def test_modelopt_1411_gate_and_up_share_a_global_scale(kernels: Kernels) -> None:
    """An up projection a thousand times smaller than its gate: one global scale an expert, codes by that scale."""
    gate_up, down = weights(3, 16, 32, 6)
    gate_up[:, 16:] *= 1e-3
    packed, _ = pack(kernels, gate_up, down, "w4a4").dequantised()
    for e in range(3):
        assert torch.equal(packed[e], quantise(gate_up[e], SPECS["weight_spec"]).dequantise())


@pytest.mark.parametrize("kind", ["w4a4", "w4a16"])
def test_codes_of_a_checkpoint(kernels: Kernels, kind: str) -> None:
    """Codes with one global scale an expert pack to what packing the weights gives."""
    w = weights(4, 32, 48, 7)
    stacks = []
    for t in w:
        parts = [quantise(t[e], SPECS["weight_spec"]) for e in range(4)]
        stacks.append(
            QuantTensor(
                torch.stack([p.codes for p in parts]),
                torch.stack([p.scales for p in parts]),
                torch.stack([p.global_scale for p in parts]),
                SPECS["weight_spec"],
                tuple(t.shape),
            )
        )
    x, ids, gates = routing(5, 2, 4, 48, 7)
    a, b = pack(kernels, *w, kind), pack(kernels, *stacks, kind)
    assert torch.equal(kernels.experts(x, ids, gates, a), kernels.experts(x, ids, gates, b))
    assert all(torch.equal(s, t) for s, t in zip(a.dequantised(), b.dequantised(), strict=True))


def test_activation_spec_of_another_library(kernels: Kernels) -> None:
    foreign = get_spec("modelopt").replace(global_scale="constant", constant=0.01)
    w = weights(4, 16, 32, 8)
    x, ids, gates = routing(6, 2, 4, 32, 8)
    reference = get("reference")
    y = kernels.experts(x, ids, gates, pack(kernels, *w, "w4a4", activation_spec=foreign))
    assert torch.equal(y, reference.experts(x, ids, gates, pack(reference, *w, "w4a4", activation_spec=foreign)))


def test_bad_arguments_name_their_shapes(kernels: Kernels) -> None:
    w = weights(4, 16, 32, 9)
    packed = pack(kernels, *w, "w4a4", name="layers.2.experts")
    x, ids, gates = routing(6, 2, 4, 32, 9)
    with pytest.raises(ShapeError, match=r"\(6, 31\)"):
        kernels.experts(x[:, :31], ids, gates, packed)
    with pytest.raises(ShapeError, match=r"\(5, 2\)"):
        kernels.experts(x, ids, gates[:5], packed)
    with pytest.raises(ShapeError, match="int64"):
        kernels.experts(x, ids.long(), gates, packed)
    for bad in (-1, 4):
        wrong = ids.clone()
        wrong[3, 1] = bad
        with pytest.raises(ShapeError, match=str(bad)):
            kernels.experts(x, wrong, gates, packed)
    with pytest.raises(ShapeError, match=r"\(4, 32, 24\)"):
        pack(kernels, w[0], torch.randn(4, 32, 24), "bf16")
    with pytest.raises(ShapeError, match="24"):
        pack(kernels, torch.randn(4, 48, 32), torch.randn(4, 32, 24), "w4a4")
    with pytest.raises(ConfigError, match="weight_spec"):
        pack(kernels, *w, "w4a16", weight_spec=None)
    bad_x = x.clone()
    bad_x[3, 3] = float("inf")
    with pytest.raises(NumericsError, match=r"layers\.2\.experts"):
        kernels.experts(bad_x, ids, gates, packed)
    huge = x * 1e30
    with pytest.raises(NumericsError, match="intermediate"):
        kernels.experts(huge, ids, gates, packed)
