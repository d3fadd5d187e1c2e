"""From projection to attention in one call: bit-equal to the single steps, and nothing written when a value is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from halfbyte.errors import NumericsError, ShapeError
from halfbyte.formats import get_spec
from halfbyte.kernels import AttentionStep, Kernels, available, get
from halfbyte.kernels.kv import KvLayer

NAMES = [name for name in available() if name != "native"]
HEADS, KV, WIDTH, PAGE = 6, 2, 32, 16


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return get(request.param)


def new_layer(kernels: Kernels, kind: str, spec: str = "halfbyte_kv") -> KvLayer:
    rule = get_spec(spec) if kind == "fp4" else None
    return kernels.new_kv_layer(4, PAGE, KV, WIDTH, kind, rule)  # type: ignore[arg-type]


def two_sequences() -> AttentionStep:
    """Five new tokens after eleven of the first sequence, three of a new second one."""
    angles = torch.arange(64).unsqueeze(1) * 0.9 ** torch.arange(WIDTH // 2)
    return AttentionStep(
        positions=torch.tensor([11, 12, 13, 14, 15, 0, 1, 2]),
        slots=torch.tensor([43, 44, 45, 46, 47, 16, 17, 18]),
        page_table=torch.tensor([[2, -1], [1, -1]], dtype=torch.int32),
        query_start=torch.tensor([0, 5, 8], dtype=torch.int32),
        context_length=torch.tensor([16, 3], dtype=torch.int32),
        cos=angles.cos(),
        sin=angles.sin(),
        scale=WIDTH**-0.5,
    )


def fill(kernels: Kernels, layer: KvLayer) -> None:
    g = torch.Generator().manual_seed(3)
    k, v = (torch.randn(64, KV, WIDTH, generator=g) for _ in "kv")
    kernels.store_kv(layer, k, v, torch.arange(64))


def projection() -> Tensor:
    return torch.randn(8, (HEADS + 2 * KV) * WIDTH, generator=torch.Generator().manual_seed(4))


def by_steps(
    kernels: Kernels, qkv: Tensor, layer: KvLayer, step: AttentionStep, q_norm: Tensor | None, k_norm: Tensor | None
) -> Tensor:
    q, k, v = (x.reshape(8, -1, WIDTH) for x in qkv.split((HEADS * WIDTH, KV * WIDTH, KV * WIDTH), dim=1))
    if q_norm is not None and k_norm is not None:
        q, k = kernels.rms_norm(q.contiguous(), q_norm, 1e-6), kernels.rms_norm(k.contiguous(), k_norm, 1e-6)
    q, k = (kernels.rope(x, step.positions, step.cos, step.sin) for x in (q, k))
    kernels.store_kv(layer, k, v.contiguous(), step.slots)
    return kernels.attention(q, layer, step.page_table, step.query_start, step.context_length, step.scale).reshape(
        8, -1
    )


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp4"])
@pytest.mark.parametrize("normed", [False, True])
def test_one_call_equals_the_single_steps_of_the_reference(kernels: Kernels, kind: str, normed: bool) -> None:
    norms = tuple(torch.rand(WIDTH) + 0.5 for _ in "qk") if normed else (None, None)
    reference, step, qkv = get("reference"), two_sequences(), projection()
    ours, theirs = new_layer(kernels, kind), new_layer(reference, kind)
    for layer in (ours, theirs):
        fill(reference, layer)
    out = kernels.attend(qkv, ours, step, q_norm=norms[0], k_norm=norms[1], eps=1e-6)
    expected = by_steps(reference, qkv, theirs, step, *norms)
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(ours.read(torch.arange(64)), theirs.read(torch.arange(64))))


def test_a_rule_that_only_the_reference_knows_still_runs(kernels: Kernels) -> None:
    spec = get_spec("halfbyte_kv").replace(ties="away")
    layers = [k.new_kv_layer(4, PAGE, KV, WIDTH, "fp4", spec) for k in (kernels, get("reference"))]
    outs = [k.attend(projection(), layer, two_sequences()) for k, layer in zip((kernels, get("reference")), layers)]
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"positions": torch.tensor([11, 12, 13, 14, 15, 0, 1, 64])}, "position"),
        ({"slots": torch.tensor([43, 44, 45, 46, 47, 16, 17, 64])}, "slot"),
        ({"slots": torch.tensor([43, 44, 45, 46, 47, 16, 17, 17])}, "slot"),
        ({"context_length": torch.tensor([33, 3], dtype=torch.int32)}, "context"),
        ({"page_table": torch.tensor([[2, -1], [9, -1]], dtype=torch.int32)}, "page"),
        ({"query_start": torch.tensor([0, 6, 7], dtype=torch.int32)}, "quer"),
        ({"slots": torch.tensor([43, 44])}, "slots"),
        ({"cos": torch.zeros(64, 8)}, "cos"),
    ],
)
def test_wrong_places_are_refused(kernels: Kernels, change: dict[str, Tensor], named: str) -> None:
    layer = new_layer(kernels, "fp4")
    with pytest.raises(ShapeError, match=named):
        kernels.attend(projection(), layer, replace(two_sequences(), **change))


def test_a_projection_that_does_not_fit_is_refused_with_its_shape(kernels: Kernels) -> None:
    layer, norm = new_layer(kernels, "bf16"), torch.ones(8)
    for wrong in (torch.zeros(8, 100), torch.zeros(7, (HEADS + 2 * KV) * WIDTH), torch.zeros(8, 2 * KV * WIDTH)):
        with pytest.raises(ShapeError, match=str(wrong.shape[1])):
            kernels.attend(wrong, layer, two_sequences())
    with pytest.raises(ShapeError, match="norm"):
        kernels.attend(projection(), layer, two_sequences(), q_norm=norm)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_key_that_is_not_finite_is_refused_and_nothing_is_written(kernels: Kernels, bad: float) -> None:
    layer, qkv = new_layer(kernels, "fp4"), projection()
    fill(kernels, layer)
    before = [t.clone() for t in layer.read(torch.arange(64))]
    qkv[3, (HEADS + KV) * WIDTH - 1] = bad
    with pytest.raises(NumericsError):
        kernels.attend(qkv, layer, two_sequences())
    assert all(torch.equal(a, b) for a, b in zip(layer.read(torch.arange(64)), before))
