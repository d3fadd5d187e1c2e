"""What ``--worker-extension-cls halfbyte.rollout.vllm.worker.WorkerExtension`` adds to vLLM's workers.

Naming the class registers the transfer engine, so one flag and ``--weight-transfer-config '{"backend": "halfbyte"}'`` are all
that a server needs. Its methods are called through ``/collective_rpc`` and answer with JSON values.
"""

from __future__ import annotations

from typing import Any

from halfbyte.rollout.vllm.fresh import Fresh, differences, load_fresh
from halfbyte.rollout.vllm.handshake import PROTOCOL, Handshake
from halfbyte.rollout.vllm.transfer import TransferEngine, register

__all__ = ["Extension"]


class Extension:
    """Methods of a worker. The fields are vLLM's."""

    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any
    rank: int

    def halfbyte_info(self) -> dict[str, Any]:
        """A :class:`~halfbyte.rollout.vllm.handshake.Handshake`."""
        import vllm

        config, engine = self.vllm_config, self.weight_transfer_engine
        held = engine.held if isinstance(engine, TransferEngine) else None
        return Handshake(
            protocol=PROTOCOL,
            vllm=str(vllm.__version__),
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            quantization=config.model_config.quantization,
            device=str(config.device_config.device_type),
            chunked_prefill=bool(config.scheduler_config.enable_chunked_prefill),
            backend=None if config.weight_transfer_config is None else config.weight_transfer_config.backend,
            run=None if held is None else held.run,
            version=None if held is None else held.version,
            state=None if held is None else held.state,
            rank=int(self.rank),
        ).to_json()

    def halfbyte_last(self) -> dict[str, Any]:
        """What the last update did; empty where there was nothing to do."""
        last = self.weight_transfer_engine.last
        if last is None:
            return {}
        return {
            "kinds": list(last.kinds),
            "fetched_bytes": last.fetched_bytes,
            "changed": last.changed,
            "prepare_seconds": last.prepare_seconds,
            "load_seconds": last.pause_seconds,
        }

    def halfbyte_compare(self) -> dict[str, Any]:
        """Load a model afresh and keep it: where it differs from the one served, and which host tensors are not the version's."""
        engine: Any = self.weight_transfer_engine
        served = self.model_runner.model
        fresh = load_fresh(self.vllm_config, engine.served.host)
        self.__dict__["_halfbyte_other"] = fresh
        return {"different": differences(served, fresh.model), "damaged": sorted(engine.damaged())}

    def halfbyte_exchange(self) -> dict[str, Any]:
        """Serve the model that is kept, and keep the one that was served. Twice is as before."""
        other: Fresh = self.__dict__["_halfbyte_other"]
        layers = self.vllm_config.compilation_config.static_forward_context
        mine = Fresh(self.model_runner.model, {name: layers[name] for name in other.layers})
        for name, layer in other.layers.items():
            _adopt(layer, layers[name])
        self.model_runner.model = other.model
        layers.update(other.layers)
        self.__dict__["_halfbyte_other"] = mine
        return {}

    def halfbyte_forget(self) -> dict[str, Any]:
        """Let go of the model that is kept."""
        self.__dict__.pop("_halfbyte_other", None)
        return {}


def _adopt(layer: Any, running: Any) -> None:
    """Give a layer what the runner has put on the one that runs: its KV cache, and attributes that a load does not make."""
    for key, value in vars(running).items():
        if key == "kv_cache" or key not in vars(layer):
            vars(layer)[key] = value


def __getattr__(name: str) -> Any:
    if name == "WorkerExtension":
        register()
        return Extension
    raise AttributeError(name)
