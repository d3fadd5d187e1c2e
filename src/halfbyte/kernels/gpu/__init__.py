"""Kernels for CUDA tensors: FP4 products in Triton, around them the compiled or the plain reference.

Imports Triton. ``halfbyte.kernels.registry.for_device`` chooses them where there is a CUDA device and Triton.
"""

from __future__ import annotations

from torch import Tensor

from halfbyte.formats import Payload, PayloadBits
from halfbyte.kernels.compiled import CompiledKernels
from halfbyte.kernels.gpu.products import w4a4_product, w4a16_product
from halfbyte.kernels.reference import ReferenceKernels
from halfbyte.kernels.reference import experts as _experts
from halfbyte.kernels.reference import linear as _linear
from halfbyte.kernels.reference.linear import Products
from halfbyte.kernels.weights import ExpertsRecord, PackedExperts, PackedLinear

__all__ = ["CompiledTritonKernels", "TritonKernels"]

_PRODUCTS = Products(w4a4_product, w4a16_product)


class TritonKernels(ReferenceKernels):
    """``Kernels`` in torch with FP4 products in Triton; the docstrings are the protocol's. ``w4a4`` has the reference's bits,
    ``w4a16`` sums in another order (the bound: ``products.py``)."""

    @property
    def name(self) -> str:
        return "triton"

    def linear(
        self,
        x: Tensor,
        w: PackedLinear,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        return _linear.linear(x, w, norm, eps, gated, residual, _PRODUCTS)

    def linear_recorded(
        self,
        x: Tensor,
        w: PackedLinear,
        bits: PayloadBits,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Payload]:
        return _linear.linear_recorded(x, w, bits, norm, eps, gated, residual, _PRODUCTS)

    def experts(self, x: Tensor, expert_ids: Tensor, gates: Tensor, w: PackedExperts) -> Tensor:
        return _experts.experts(x, expert_ids, gates, w, swiglu=self.swiglu, products=_PRODUCTS)

    def experts_recorded(self, x: Tensor, expert_ids: Tensor, gates: Tensor, w: PackedExperts) -> ExpertsRecord:
        return _experts.experts_recorded(x, expert_ids, gates, w, swiglu=self.swiglu, products=_PRODUCTS)


class CompiledTritonKernels(TritonKernels, CompiledKernels):
    """:class:`TritonKernels` whose element-wise passes are compiled, see ``halfbyte.kernels.compiled``."""

    @property
    def name(self) -> str:
        return "triton, compiled"
