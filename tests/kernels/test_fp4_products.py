"""FP4 products in Triton: in its interpreter where there is no CUDA device, else on it; held to the reference on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from halfbyte.formats import QuantTensor, dequantise, get_spec, pack_codes, quantise
from halfbyte.kernels import get
from halfbyte.kernels.gpu import TritonKernels
from halfbyte.kernels.gpu.products import w4a4_product, w4a16_product
from halfbyte.kernels.reference import linear as reference
from halfbyte.kernels.reference.linear import RowStore

pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [("halfbyte", "halfbyte_token"), ("mx_rceil", "mx_rceil"), ("modelopt", "halfbyte_kv")]
SHAPES = [(5, 70, 192), (33, 64, 64), (1, 3, 32), (64, 128, 96)]


def there(q: QuantTensor) -> QuantTensor:
    return replace(q, **{part: getattr(q, part).to(DEVICE) for part in ("codes", "scales", "global_scale")})


def operands(m: int, n: int, k: int, specs: tuple[str, str], seed: int = 0) -> tuple[torch.Tensor, QuantTensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=g) * torch.exp(3 * torch.randn(m, 1, generator=g))
    w = torch.randn(n, k, generator=g) * torch.exp(torch.randn(n, 1, generator=g))
    return x, quantise(w, get_spec(specs[0]))


@pytest.mark.parametrize("specs", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_w4a4_has_the_bits_of_the_reference(specs: tuple[str, str], shape: tuple[int, int, int]) -> None:
    x, w = operands(*shape, specs)
    a = quantise(x, get_spec(specs[1]))
    y = w4a4_product(there(a), RowStore(quantised=there(w)))
    assert torch.equal(y.cpu(), reference.w4a4_product(a, RowStore(quantised=w)))
    exact = dequantise(a).double() @ dequantise(w).double().t()
    torch.testing.assert_close(y.cpu().double(), exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("specs", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_w4a16_within_its_bound(specs: tuple[str, str], shape: tuple[int, int, int]) -> None:
    x, w = operands(*shape, specs)
    y = w4a16_product(x.to(DEVICE), RowStore(quantised=there(w))).cpu().double()
    a, b = x.bfloat16().double(), dequantise(w).double()
    bound = 2 * shape[2] * 2.0**-23 * (a.abs() @ b.abs().t())
    assert bool(((y - a @ b.t()).abs() <= bound).all())


@pytest.mark.parametrize("name", ["halfbyte", "mx_rceil"])
def test_every_code_under_every_scale(name: str) -> None:
    """One activation of 6, which quantises exactly, picks one column: the product is the weight as it dequantises."""
    spec = get_spec(name)
    last = 0x7E if name == "halfbyte" else 0xF6  # 144 times more would overflow
    scales = torch.arange(1 if name == "mx_rceil" else 0, last + 1, dtype=torch.uint8).unsqueeze(1)
    codes = pack_codes(torch.arange(32, dtype=torch.uint8).remainder(16)[: spec.block].repeat(len(scales), 1))
    w = QuantTensor(codes, scales, torch.tensor(1.0), spec, (len(scales), spec.block))
    x = 6.0 * torch.eye(spec.block)
    wanted = 6.0 * dequantise(w).t()
    a = quantise(x, get_spec("halfbyte_kv" if name == "halfbyte" else "mx_rceil"))
    store = RowStore(quantised=there(w))
    assert torch.equal(w4a16_product(x.to(DEVICE), store).cpu(), wanted)
    assert torch.equal(dequantise(a), x)
    assert torch.equal(w4a4_product(there(a), store).cpu(), wanted)


def test_kernels_around_the_products() -> None:
    ours, theirs, g = TritonKernels(), get("reference"), torch.Generator().manual_seed(3)
    x, w = operands(7, 12, 64, FORMATS[0])
    bias, residual, norm = (torch.randn(*s, generator=g) for s in ((12,), (7, 6), (64,)))
    token, around = get_spec("halfbyte_token"), {"eps": 1e-6, "gated": True}
    here = theirs.pack_linear(w, "w4a4", activation_spec=token, bias=bias)
    moved = ours.pack_linear(there(w), "w4a4", activation_spec=token, bias=bias.to(DEVICE))
    y = ours.linear(x.to(DEVICE), moved, norm=norm.to(DEVICE), residual=residual.to(DEVICE), **around)
    assert torch.equal(y.cpu(), theirs.linear(x, here, norm=norm, residual=residual, **around))
    y, payload = ours.linear_recorded(x.to(DEVICE), moved, 4)
    wanted, recorded = theirs.linear_recorded(x, here, 4)
    assert torch.equal(y.cpu(), wanted)
    assert torch.equal(payload.codes.cpu(), recorded.codes)


def test_experts() -> None:
    ours, theirs, g = TritonKernels(), get("reference"), torch.Generator().manual_seed(4)
    gate_up, down = torch.randn(4, 64, 64, generator=g), torch.randn(4, 64, 32, generator=g)
    specs = {"weight_spec": get_spec("halfbyte"), "activation_spec": get_spec("halfbyte_token")}
    here = theirs.pack_experts(gate_up, down, "w4a4", **specs)
    moved = ours.pack_experts(gate_up.to(DEVICE), down.to(DEVICE), "w4a4", **specs)
    x, gates = torch.randn(9, 64, generator=g), torch.rand(9, 2, generator=g)
    ids = torch.randint(0, 4, (9, 2), generator=g, dtype=torch.int32)
    found = ours.experts_recorded(x.to(DEVICE), ids.to(DEVICE), gates.to(DEVICE), moved)
    wanted = theirs.experts_recorded(x, ids, gates, here)
    assert torch.equal(found.output.cpu(), wanted.output)
    assert torch.equal(found.middle.codes.cpu(), wanted.middle.codes)
    assert torch.equal(ours.experts(x.to(DEVICE), ids.to(DEVICE), gates.to(DEVICE), moved).cpu(), wanted.output)


COMPILE = """
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from halfbyte.kernels.gpu import products as P
def signature(function, numbers, constants):
    names = function.arg_names
    types = {n: "*u8" if "codes" in n or "scales" in n else "i32" if len(n) == 1 and n != "x" else "*fp32" for n in names}
    types |= {"x": "*bf16"} if "x" in names else {}
    return types | dict.fromkeys(constants, "constexpr")
for function, more in ((P._w4a4, {}), (P._w4a16, {"OPERAND": tl.bfloat16, "DEPTH": P._DEPTH})):
    for block in (16, 32):
        constants = {"BLOCK": block, "E8M0": block == 32, "ROWS": P._ROWS, "COLUMNS": P._COLUMNS, **more}
        source = ASTSource(function, signature(function, None, constants), constexprs=constants)
        for capability in (80, 90, 100):
            built = compile(source, target=GPUTarget("cuda", capability, 32), options=P._LAUNCH)
            ptx = built.asm["ptx"]
            assert "mma.sync" in ptx or "wgmma" in ptx or "tcgen05" in ptx, capability
            assert "fma.rn.f32" not in ptx and ".ftz" not in ptx, capability
            assert len(built.asm["cubin"]) > 0
print("built")
"""


@pytest.mark.slow
def test_they_compile_for_gpus_that_are_not_here() -> None:
    """Down to machine code of three generations, on tensor cores, without fused or flushed arithmetic; run by none."""
    path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "built"
