"""What trainer and worker tell each other before the first update, and the names both sides use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from halfbyte.rollout.vllm.errors import VllmError

__all__ = ["BACKEND", "EXTENSION", "PROTOCOL", "Handshake"]

#: The name of the transfer engine in vLLM's registry.
BACKEND = "halfbyte"
#: The class that ``--worker-extension-cls`` names.
EXTENSION = "halfbyte.rollout.vllm.worker.WorkerExtension"
#: Raised whenever a call or its meaning changes.
PROTOCOL = 1


@dataclass(frozen=True)
class Handshake:
    """A worker as it describes itself.

    Arguments:
        protocol: :data:`PROTOCOL` of its halfbyte.
        vllm: its version.
        dtype: of activations and weights, such as ``bfloat16``.
        quantization: vLLM's name of the checkpoint's quantisation; None for plain weights.
        device: ``cpu``, ``cuda``, ...
        chunked_prefill: whether prompts may be cut over steps.
        backend: the weight transfer backend it was started with; None without.
        run, version, state: the weights held; None until a refit told.
        rank: of the worker.
    """

    protocol: int
    vllm: str
    dtype: str
    quantization: str | None
    device: str
    chunked_prefill: bool
    backend: str | None
    run: str | None
    version: int | None
    state: str | None
    rank: int = 0

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object, where: str) -> Handshake:
        """Read and check what a worker sent.

        Raises:
            VllmError: not a handshake, or one of another protocol.
        """
        text, number, nothing = (str,), (int,), type(None)
        kinds: dict[str, tuple[type, ...]] = {
            "protocol": number, "vllm": text, "dtype": text, "quantization": (str, nothing), "device": text,
            "chunked_prefill": (bool,), "backend": (str, nothing), "run": (str, nothing), "version": (int, nothing),
            "state": (str, nothing), "rank": number,
        }  # fmt: skip
        if not isinstance(data, Mapping) or "protocol" not in data:
            raise VllmError(
                "the worker does not introduce itself", where=where, expected=f"--worker-extension-cls {EXTENSION}"
            )
        if data["protocol"] != PROTOCOL:
            raise VllmError(
                f"the worker's halfbyte speaks protocol {data['protocol']!r}",
                where=where,
                expected=f"{PROTOCOL}",
                fix="install the same halfbyte in vLLM's environment as beside the trainer",
            )
        for name, kind in kinds.items():
            if type(data.get(name)) not in kind:
                raise VllmError(f"the worker says {name} = {data.get(name)!r}", where=where)
        return cls(**{name: data[name] for name in kinds})
