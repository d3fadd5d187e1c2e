"""A worker extension with faults to inject: loaded by vLLM's worker in the slow tests, never by halfbyte itself."""

from __future__ import annotations

from typing import Any

from halfbyte.rollout.vllm import served
from halfbyte.rollout.vllm.transfer import register
from halfbyte.rollout.vllm.worker import Extension


class Faulty(Extension):
    """Faults strike right after the next update has loaded the model."""

    def fault_after_update(self, kind: str) -> dict[str, Any]:
        """``no_repack``: vLLM's own reload and nothing else; ``bit``: one bit of an expert; ``linear``: a prepacked product
        is off by a BF16 step; ``epsilon``: a constant that no tensor holds; ``fail``: loading breaks off half-way, once;
        ``none``: as it should be."""
        engine = self.weight_transfer_engine
        model: Any = engine.served
        for name in ("load", "repack"):
            vars(model).pop(name, None)
        model.repack = served.repack
        if kind == "no_repack":
            model.repack = lambda layer: None
        elif kind == "fail":
            model.load = lambda changed: _fail(model, changed)
        elif kind != "none":
            model.load = lambda changed: _then(model, changed, kind)
        return {"kind": kind}

    def fault_mend_epsilon(self) -> dict[str, Any]:
        """Undo ``epsilon``."""
        layers = self.weight_transfer_engine.model.modules()
        next(m for m in layers if hasattr(m, "variance_epsilon")).variance_epsilon = 1e-6
        return {}


def _then(model: Any, changed: Any, kind: str) -> None:
    import torch

    type(model).load(model, changed)
    layers = dict(model.model.named_modules())
    if kind == "bit":
        name = next(n for n, p in model.model.named_parameters() if n.endswith("w13_weight"))
        dict(model.model.named_parameters())[name].data.view(torch.int16).view(-1)[1234] ^= 1
    elif kind == "linear":
        layer = next(m for n, m in layers.items() if n.endswith("qkv_proj"))
        right = layer.cpu_linear
        layer.cpu_linear = lambda x, weight, bias: right(x, weight, bias) * 1.0078125
    elif kind == "epsilon":
        next(m for m in layers.values() if hasattr(m, "variance_epsilon")).variance_epsilon = 0.1


def _fail(model: Any, changed: Any) -> None:
    """Half of the tensors arrive, then the loader raises; the next call (the way back) is whole."""
    vars(model).pop("load")
    own, host = model.model.load_weights, model.host

    def broken(weights: Any) -> None:
        rows = list(weights)
        own(iter(rows[: len(rows) // 2]))
        raise OSError("injected")

    model.model.load_weights = broken
    try:
        model.load(changed)
    finally:
        del model.model.load_weights
        assert model.host is host


def __getattr__(name: str) -> Any:
    if name == "WorkerExtension":
        register()
        return Faulty
    raise AttributeError(name)
