"""The weight transfer engine that vLLM drives: start, update, finish. Runs in vLLM's process.

Weights come from the refit store, as deltas, by a subscriber in the worker; the trainer only says which version. An update is
taken wholly or not at all: when it fails, the version served before is loaded again and the error goes to the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from halfbyte.errors import RefitError
from halfbyte.refit.adapters.arrays import ArraysTarget
from halfbyte.refit.adapters.loader import ModuleLoader
from halfbyte.refit.patch import Stamp
from halfbyte.refit.store import open_store
from halfbyte.refit.subscriber import Refit, Subscriber
from halfbyte.rollout.vllm.handshake import BACKEND
from halfbyte.rollout.vllm.served import ServedModel
from halfbyte.rollout.vllm.target import Exactly, ModelTarget

__all__ = ["InitInfo", "TransferEngine", "UpdateInfo", "register"]


@dataclass
class InitInfo:
    """What the trainer says once.

    Arguments:
        store: address of the refit store as the worker reaches it.
        options: of the store (credentials, endpoint).
        run: refuse any other run.
        name: this reader's name in the store; the rank is added.
    """

    store: str
    options: dict[str, Any] = field(default_factory=dict)
    run: str | None = None
    name: str = "vllm"


@dataclass
class UpdateInfo:
    """Which version to take."""

    version: int
    state: str


class TransferEngine:
    """Mixed into vLLM's ``WeightTransferEngine`` by :func:`register`, which gives the constructor and its fields."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    model: Any
    model_config: Any
    vllm_config: Any
    parallel_config: Any
    subscriber: Subscriber | None = None
    served: ServedModel | None = None
    target: ModelTarget | None = None
    last: Refit | None = None
    opened: bool = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Read the checkpoint that the server was started from to the host, and follow the store.

        A server that served another run goes back to that checkpoint first: its weights may be anything.

        Raises:
            RefitError: the store cannot be opened.
        """
        store = open_store(init_info.store, **init_info.options)
        host = self.checkpoint()
        self.served = ServedModel(self.model, self.model_config, host)
        self.target = ModelTarget(ArraysTarget(host, make=ModuleLoader(None).make), self.served)
        if self.opened:
            self.served.load(list(host))
        self.opened = True
        self.subscriber = Subscriber(
            store,
            self.target,
            name=f"{init_info.name}-{getattr(self.parallel_config, 'rank', 0)}",
            run=init_info.run,
        )

    def checkpoint(self) -> dict[str, Any]:
        """Name -> tensor on the host, as vLLM's loader reads the model's files."""
        from vllm.model_executor.model_loader import get_model_loader

        loader = get_model_loader(self.vllm_config.load_config)
        if not hasattr(loader, "get_all_weights"):
            raise RefitError(
                f"vLLM's {type(loader).__name__} does not read checkpoints",
                expected="--load-format auto or safetensors",
            )
        weights = loader.get_all_weights(self.model_config, self.model)
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights}

    def start_weight_update(self) -> None:
        """Nothing is touched before the update is fetched and checked."""
        self._open()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Fetch, check, patch the host and load the model.

        Raises:
            RefitError: the version served before is served still; or, where the message says so, the engine must stay paused.
        """
        subscriber = self._open()
        subscriber.votes = Exactly(update_info.version, update_info.state)
        self.last = subscriber.refit()

    def finish_weight_update(self) -> None:
        """The model was finished layer by layer."""

    def shutdown(self) -> None:
        """Let go of host and store."""
        self.subscriber = self.served = self.target = None

    @property
    def held(self) -> Stamp | None:
        """The version that is served; None where no refit has told, or the model is between two versions."""
        if self.subscriber is None or self.target is None or not self.target.whole:
            return None
        return self.subscriber.held

    def damaged(self) -> dict[str, tuple[int, ...]]:
        """Host tensors whose bytes are not those of the version held -> the blocks."""
        return self._open().audit()

    def _open(self) -> Subscriber:
        if self.subscriber is None:
            raise RefitError("the transfer engine is not open", expected="init_weight_transfer_engine before an update")
        return self.subscriber


def register() -> None:
    """Make the engine known to vLLM as ``halfbyte``, once a process."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        engine = type("HalfbyteTransferEngine", (TransferEngine, WeightTransferEngine), {})
        WeightTransferEngineFactory.register_engine(BACKEND, engine)
