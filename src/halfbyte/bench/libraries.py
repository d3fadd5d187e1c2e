"""Other libraries' NVFP4 quantisers on the CPU, as baselines where they are installed. Nothing here is a dependency."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

__all__ = ["LIBRARIES", "Library", "find_libraries"]


@dataclass(frozen=True)
class Library:
    """A library's way: quantise BF16 (amax of the tensor included), and dequantise what that returned to BF16."""

    name: str
    quantise: Callable[[Tensor], Any]
    dequantise: Callable[[Any], Tensor]


def _torchao() -> Library:
    name = "torchao.prototype.mx_formats.nvfp4_tensor"
    module = importlib.import_module(name)

    def quantise(x: Tensor) -> Any:
        scale = module.per_tensor_amax_to_scale(x.abs().amax().float())
        return module.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)

    return Library(f"torchao {metadata.version('torchao')}", quantise, lambda q: q.dequantize(torch.bfloat16))


def _modelopt() -> Library:
    module = importlib.import_module("modelopt.torch.quantization.qtensor.nvfp4_tensor")

    def dequantise(q: Any) -> Tensor:
        codes, scale, double_scale = q
        out: Tensor = codes.dequantize(
            dtype=torch.bfloat16, scale=scale, double_scale=double_scale, block_sizes={-1: 16}
        )
        return out

    version = metadata.version("nvidia-modelopt")
    return Library(f"modelopt {version}", lambda x: module.NVFP4QTensor.quantize(x, 16), dequantise)


LIBRARIES: Mapping[str, Callable[[], Library]] = MappingProxyType({"torchao": _torchao, "modelopt": _modelopt})


def find_libraries() -> tuple[list[Library], list[str]]:
    """The libraries that can be used here, and a line on each that cannot."""
    found, absent = [], []
    for name, make in LIBRARIES.items():
        try:
            found.append(make())
        except (ImportError, AttributeError) as error:
            absent.append(f"{name}: not compared with, because it cannot be imported ({type(error).__name__}: {error})")
    return found, absent
