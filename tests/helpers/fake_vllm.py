"""A vLLM server as far as halfbyte talks to one: the wire, the pauses and the faults are scripted, the refit inside is real.

Its language model is two products of the served weights, so that a weight that was not loaded shows in every log-prob.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import numpy.typing as npt
import torch

from halfbyte.refit.adapters.arrays import ArraysTarget
from halfbyte.refit.adapters.loader import ModuleLoader
from halfbyte.refit.store import open_store
from halfbyte.refit.subscriber import Subscriber
from halfbyte.rollout.vllm.handshake import PROTOCOL
from halfbyte.rollout.vllm.target import ModelTarget, whole_groups
from halfbyte.rollout.vllm.transfer import InitInfo, TransferEngine, UpdateInfo

Numbers = npt.NDArray[np.float64]


def language_model(weights: Mapping[str, torch.Tensor]) -> Callable[[Sequence[int]], Numbers]:
    """Context -> logits [V] float64."""
    embed, head = (weights[name].double().numpy() for name in ("model.embed_tokens.weight", "lm_head.weight"))
    shift = sum(float(t.double().sum()) for name, t in weights.items() if ".layers." in name)

    def logits(ids: Sequence[int]) -> Numbers:
        values: Numbers = 0.25 * head @ embed[ids[-1]] + np.sin(np.arange(len(head)) * (1 + shift) + sum(ids))
        return values

    return logits


def log_softmax(values: Numbers) -> Numbers:
    values = values - values.max()
    out: Numbers = values - np.log(np.exp(values).sum())
    return out


class Loading:
    """The model: loads whole groups from the host, unless told otherwise."""

    def __init__(self, fake: FakeVllm) -> None:
        self.fake = fake

    def load(self, changed: Collection[str]) -> None:
        for name in whole_groups(changed, self.fake.host):
            if name not in self.fake.stale:
                self.fake.served[name] = self.fake.host[name].clone()
        if self.fake.break_loads:
            self.fake.break_loads -= 1
            raise OSError("injected")


class FakeTransfer(TransferEngine):
    """The real engine over the fake model."""

    def __init__(self, fake: FakeVllm) -> None:
        self.fake = fake

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        target = ArraysTarget(self.fake.host, make=ModuleLoader(None).make)
        store = open_store(init_info.store, **init_info.options)
        self.target = ModelTarget(target, Loading(self.fake))
        self.subscriber = Subscriber(store, self.target, run=init_info.run)


class FakeVllm:
    """Serves until closed.

    Arguments:
        weights: that it starts with.

    Attributes:
        calls: how often each path was asked. bodies: the last body of each path.
        script: path -> statuses (or callables of the handler) that answer the next calls in place of the truth.
        extension, protocol, dtype, backend: how its worker introduces itself; no extension is a plain server.
        raw: log-probs leave the temperature out, as vLLM does by default.
        hold: samples wait after so many tokens until they are aborted.
        stale: tensors that a load leaves as they were. break_loads: so many loads fail at their end.
        twist: what an exchange does not show in weights: added to the logits of the served model.
        masks: return what filters kept. chunked: prompts may be cut.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], *, max_length: int = 256) -> None:
        self.host = {name: tensor.clone() for name, tensor in weights.items()}
        self.served = {name: tensor.clone() for name, tensor in weights.items()}
        self.other: dict[str, torch.Tensor] | None = None
        self.max_length, self.label, self.epoch, self.paused = max_length, "default", 0, False
        self.calls: Counter[str] = Counter()
        self.bodies: dict[str, Any] = {}
        self.headers: dict[str, str] = {}
        self.script: dict[str, list[int | Callable[[Any], None]]] = {}
        self.extension, self.protocol, self.dtype, self.backend = True, PROTOCOL, "bfloat16", "halfbyte"
        self.raw, self.masks, self.hold, self.twist, self.chunked = False, False, 0, 0.0, False
        self.stale: set[str] = set()
        self.break_loads = 0
        self.transfer = FakeTransfer(self)
        self.state = threading.Condition()
        self._exchanged = self.active = False
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                """Be quiet."""

            def answer(self, status: int, body: Any) -> None:
                data = b"" if body is None else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                fake.handle(self, None)

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fake.handle(self, json.loads(data) if data else None)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    # ---- what it does

    def handle(self, handler: Any, body: Any) -> None:
        parts = urlsplit(handler.path)
        path = parts.path
        self.calls[path] += 1
        self.bodies[path], self.headers = body, dict(handler.headers)
        if self.script.get(path):
            scripted = self.script[path].pop(0)
            if callable(scripted):
                scripted(handler)
            else:
                handler.answer(scripted, {"error": {"message": f"scripted {scripted}"}})
            return
        method = getattr(self, "on_" + path.strip("/").replace("/", "_"), None)
        if method is None:
            handler.answer(404, {"detail": "Not Found"})
            return
        try:
            handler.answer(200, method(body, parse_qs(parts.query)))
        except Exception as error:  # as vLLM does
            handler.answer(500, {"error": {"message": str(error)}})

    def on_health(self, body: Any, query: Any) -> Any:
        return None

    def on_version(self, body: Any, query: Any) -> Any:
        return {"version": "0.32.0"}

    def on_v1_models(self, body: Any, query: Any) -> Any:
        return {"data": [{"id": "m", "max_model_len": self.max_length}]}

    def on_pause(self, body: Any, query: Any) -> Any:
        assert query["mode"] == ["abort"]
        with self.state:
            self.paused, self.epoch = True, self.epoch + 1
            self.state.notify_all()
        return {"status": "paused"}

    def on_is_paused(self, body: Any, query: Any) -> Any:
        return {"is_paused": self.paused}

    def on_resume(self, body: Any, query: Any) -> Any:
        with self.state:
            self.paused = False
            self.state.notify_all()
        return {"status": "resumed"}

    def on_reset_prefix_cache(self, body: Any, query: Any) -> Any:
        return {"success": True}

    def on_init_weight_transfer_engine(self, body: Any, query: Any) -> Any:
        self.transfer.init_transfer_engine(InitInfo(**body["init_info"]))
        return {}

    def on_start_weight_update(self, body: Any, query: Any) -> Any:
        assert not self.active, "an update is open"
        self.transfer.start_weight_update()
        self.active = True
        return {}

    def on_update_weights(self, body: Any, query: Any) -> Any:
        assert self.paused, "weights change in a pause"
        assert self.active, "no update is open"
        self.active = False
        self.transfer.receive_weights(UpdateInfo(**body["update_info"]))
        self.active = True
        return {}

    def on_finish_weight_update(self, body: Any, query: Any) -> Any:
        assert self.active, "no update is open"
        self.transfer.finish_weight_update()
        self.active = False
        self.label = body["weight_version"]
        return {}

    def on_collective_rpc(self, body: Any, query: Any) -> Any:
        if not self.extension:
            raise AttributeError(body["method"])
        return {"results": [getattr(self, "rpc_" + body["method"].removeprefix("halfbyte_"))()]}

    def rpc_info(self) -> Any:
        held = self.transfer.held or SimpleNamespace(run=None, version=None, state=None)
        return {
            "protocol": self.protocol, "vllm": "0.32.0", "dtype": self.dtype, "quantization": None,
            "device": "cpu", "chunked_prefill": self.chunked,
            "backend": self.backend, "run": held.run, "version": held.version, "state": held.state, "rank": 0,
        }  # fmt: skip

    def rpc_last(self) -> Any:
        return {}

    def rpc_compare(self) -> Any:
        self.other = {name: tensor.clone() for name, tensor in self.host.items()}
        odd = [name for name in self.host if not torch.equal(self.served[name], self.host[name])]
        return {"different": odd, "damaged": sorted(self.transfer.damaged())}

    def rpc_exchange(self) -> Any:
        assert self.other is not None
        self.served, self.other = self.other, self.served
        self._exchanged = not self._exchanged
        return {}

    def rpc_forget(self) -> Any:
        self.other = None
        return {}

    # ---- generation

    def on_inference_v1_generate(self, body: Any, query: Any) -> Any:
        sampling = body["sampling_params"]
        with self.state:
            epoch = self.epoch
            self.state.wait_for(lambda: not self.paused or self.epoch != epoch, 30)
        return {"choices": [self._sample(body["token_ids"], sampling, i, epoch) for i in range(sampling["n"])]}

    def _sample(self, prompt: list[int], sampling: Any, index: int, epoch: int) -> Any:
        draws, model = np.random.default_rng([sampling["seed"] + index]), language_model(self.served)
        ids: list[int] = []
        rows, labels, kept = [], [], []
        finish, stop = "length", None
        while len(ids) < sampling["max_tokens"]:
            with self.state:
                if self.hold and len(ids) >= self.hold:
                    self.state.wait_for(lambda: self.epoch != epoch, 30)
                if self.epoch != epoch:
                    finish = "abort"
                    break
            values = model([*prompt, *ids])
            if not self._exchanged:
                values = values + self.twist * np.arange(len(values))
            heat = sampling["temperature"] or 1.0
            scaled = log_softmax(values / heat)
            if sampling["top_k"]:
                cut = np.sort(scaled)[-sampling["top_k"]]
                scaled = log_softmax(np.where(scaled >= cut, scaled, -np.inf))
            kept.append(np.flatnonzero(np.isfinite(scaled)).tolist())
            noise = draws.gumbel(size=len(scaled)) if sampling["temperature"] else 0.0
            token = int(np.argmax(scaled + noise))
            shown = log_softmax(values) if self.raw else scaled
            order = np.argsort(-shown)
            top = [{"token_id": int(i), "logprob": float(shown[i]), "rank": r + 1} for r, i in enumerate(order[:3])]
            rows.append({"token_id": token, "logprob": float(shown[token]), "top_logprobs": top})
            ids.append(token)
            labels.append(self.label)
            if token in sampling["stop_token_ids"]:
                finish, stop = "stop", token
                break
        spans = [{"version": label, "start": i, "end": i + 1} for i, label in enumerate(labels)]
        return {
            "index": index, "token_ids": ids, "finish_reason": finish, "stop_reason": stop,
            "logprobs": {"content": rows}, "weight_versions": spans, "sampling_mask": kept if self.masks else None,
        }  # fmt: skip
