"""Writing keys and values into pages, natively; definition in :mod:`halfbyte.kernels.reference.kv_store`."""

from __future__ import annotations

from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

import halfbyte.kernels._native as _native
from halfbyte.formats import QuantSpec, get_spec
from halfbyte.kernels.kv import KvLayer
from halfbyte.kernels.native.buffers import as_buffer
from halfbyte.kernels.reference import kv_store as reference

__all__ = ["native_rule", "pages_of", "store_kv"]

_KINDS = {"fp32": 0, "bf16": 1, "fp4": 2}


#: Views made so far; a layer's arrays never move.
_views: WeakKeyDictionary[KvLayer, object] = WeakKeyDictionary()


def pages_of(layer: KvLayer) -> object:
    """The extension's view of a layer; it holds addresses, so ``layer`` must outlive it."""
    view = _views.get(layer)
    if view is None:
        view = _views[layer] = _pages_of(layer)
    return view


def _pages_of(layer: KvLayer) -> object:
    k_scales = 0 if layer.k_scales is None else layer.k_scales.data_ptr()
    v_scales = 0 if layer.v_scales is None else layer.v_scales.data_ptr()
    sizes = (_KINDS[layer.kind], layer.n_pages, layer.page_size, layer.n_kv, layer.head_dim)
    return _native.KvPages(*sizes, layer.k.data_ptr(), layer.v.data_ptr(), k_scales, v_scales, layer.global_scale)


@lru_cache(maxsize=64)
def native_rule(spec: QuantSpec) -> bool:
    """Whether the extension quantises by this spec's arithmetic: that of the default spec."""
    return spec.replace(global_scale="none", constant=1.0) == get_spec("halfbyte").replace(
        global_scale="none", constant=1.0
    )


def store_kv(layer: KvLayer, k: Tensor, v: Tensor, slots: Tensor, *, isa: int = 2) -> None:
    """See :func:`halfbyte.kernels.reference.kv_store.store_kv`; ``isa``: 0 generic, 1 AVX2, 2 AVX-512.

    A spec whose arithmetic differs from the default one runs in the reference.
    """
    if layer.spec is not None and not native_rule(layer.spec):
        return reference.store_kv(layer, k, v, slots)
    count = slots.numel()
    expected = (count, layer.n_kv, layer.head_dim)
    if k.shape != expected or v.shape != expected or slots.ndim != 1:
        reference.check_store(layer, k, v, slots)
    k, v, slots = as_buffer(k), as_buffer(v), as_buffer(slots, torch.int64)
    addresses = (k.data_ptr(), v.data_ptr(), slots.data_ptr())
    if not _native.store_kv(isa, pages_of(layer), *addresses, count):
        reference.check_store(layer, k, v, slots)
    return None
