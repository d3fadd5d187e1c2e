"""A fresh load to compare the served model with. Runs in vLLM's process.

The fresh model is built by vLLM's loader as at the start of a server, from the same host tensors, beside the served one (which
takes its memory once more while it lives). Parameters and buffers are compared bit by bit. That is not enough: on CPUs the
weights of linear layers live prepacked inside closures and the parameter left behind is empty (vLLM's own weight checker hashes
nothing for them), so such layers are compared by what they make of a fixed input.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Fresh", "differences", "load_fresh"]


@dataclass
class Fresh:
    """A model and the layers it registered, by name."""

    model: Any
    layers: dict[str, Any]


def load_fresh(vllm_config: Any, host: Mapping[str, Any]) -> Fresh:
    """Build and load a model from host tensors as a new server would."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class HostLoader(BaseModelLoader):  # type: ignore[misc]
        """Takes the host's tensors in place of files."""

        def download_model(self, model_config: Any) -> None:
            """Nothing to do."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            """By the model's own loader."""
            model.load_weights(iter(host.items()))

    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    with set_current_vllm_config(config):
        model = HostLoader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)
    return Fresh(model, config.compilation_config.static_forward_context)


def differences(served: Any, fresh: Any) -> list[str]:
    """Names of parameters, buffers and linear layers of two models that differ."""
    import torch

    mine, theirs = dict(_tensors(served)), dict(_tensors(fresh))
    odd = sorted(mine.keys() ^ theirs.keys())
    odd += [name for name in mine if name in theirs and not _same(mine[name], theirs[name])]
    others = dict(fresh.named_modules())
    with torch.inference_mode():
        for name, layer in served.named_modules():
            if hasattr(layer, "cpu_linear") and name in others and (x := _input(layer)) is not None:
                outputs = [each.cpu_linear(x, each.weight, None) for each in (layer, others[name])]
                if not _same(*outputs):
                    odd.append(name)
    return odd


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _same(a: Any, b: Any) -> bool:
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return bool(torch.equal(*flat))


def _input(layer: Any) -> Any:
    """[4, K] of a fixed pattern that no row and no column repeats; None where the layer's width is not known."""
    import torch

    names = ("input_size_per_partition", "input_size", "embedding_dim")
    width = next((size for name in names if isinstance(size := getattr(layer, name, None), int)), None)
    if width is None:
        return None
    values = torch.arange(4 * width, dtype=torch.float32).mul(0.7548776662).frac().sub(0.5)
    return values.reshape(4, width).to(layer.weight.dtype)
