"""vLLM behind the engine protocol: token ids in, trajectories out, and weight updates that are verified.

A new version can arrive while samples are in flight: they are ended with the tokens they have, the weights change, and they go on
as prompts of their own. Every token carries the version that drew it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Condition
from typing import Any

import numpy as np

from halfbyte.errors import ConfigError, DataError, RefitError
from halfbyte.models.architecture import Architecture
from halfbyte.models.precision import PRESETS, Precision, require_same
from halfbyte.models.trajectory import Trajectory
from halfbyte.refit.patch import Stamp
from halfbyte.rollout.request import Request
from halfbyte.rollout.vllm.answers import Piece, piece_of, sampling_of, seed_of
from halfbyte.rollout.vllm.client import VllmClient
from halfbyte.rollout.vllm.errors import VllmError, WrongWeightsError
from halfbyte.rollout.vllm.handshake import BACKEND, EXTENSION, Handshake
from halfbyte.rollout.vllm.verification import Probes, Verification, require_processed_logprobs, verify

__all__ = ["Updated", "VllmEngine"]

#: How often a sample is sent again that somebody else aborted.
_ABORTS = 3


@dataclass(frozen=True)
class Updated:
    """What an update did.

    Arguments:
        stamp: the version served now.
        pause_seconds: from pause to resume, fetching included.
        verification: None where it was not due.
        workers: what each worker's subscriber reports.
    """

    stamp: Stamp
    pause_seconds: float
    verification: Verification | None
    workers: tuple[Mapping[str, Any], ...] = ()


class VllmEngine:
    """Connects to a server and checks that it samples what a learner can use.

    Arguments:
        client: the server.
        arch: of the model it serves.
        precision: what it runs; recorded in trajectories. A server of BF16 weights takes ``bf16`` and nothing else.
        verify_every: verify after every so many updates (and always after the first); 0 never does.
        requests: prompts in flight at once.
    Raises:
        VllmError: the server cannot be reached, returns log-probs of another distribution, or runs another halfbyte.
        SpecMismatchError: it runs another precision.

    Attributes:
        healthy: False once the server was found with wrong weights, or left between two versions; it serves no more.
        workers: how they introduced themselves; empty for a server without halfbyte, whose weights cannot be updated.
    """

    def __init__(
        self,
        client: VllmClient,
        arch: Architecture,
        precision: Precision = PRESETS["bf16"],
        *,
        verify_every: int = 1,
        requests: int = 64,
    ) -> None:
        self.client, self.arch, self.precision = client, arch, precision
        self.verify_every, self.requests = verify_every, requests
        self.max_length = min(arch.max_positions, client.max_length())
        self.vllm = client.version()
        self.workers = self._meet()
        if self.workers and client.paused():  # a trainer was killed in mid-update; connect() loads and verifies again
            client.resume()
        require_processed_logprobs(client, arch.vocab_size)
        self.probes = Probes(arch.vocab_size)
        self.stamp: Stamp | None = None
        self.healthy = True
        self.tokens_generated = 0
        self._updates = 0
        self._gate = Condition()
        self._closed, self._in_flight = False, 0

    @property
    def version(self) -> int:
        """The weight version that the next token will be stamped with; 0 before the first update."""
        return 0 if self.stamp is None else self.stamp.version

    @property
    def requests_in_flight(self) -> int:
        """Requests that are on the server now."""
        return self._in_flight

    # ---- generation

    def generate(
        self, requests: Iterable[Request], on_finish: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        """Run requests to their end; trajectories in order of request, then sample.

        Raises:
            DataError: an empty or too long prompt, or an id outside the vocabulary (which would kill vLLM 0.32.0).
            WrongWeightsError: the engine is not healthy.
            VllmError: the server failed, also on the second try.
        """
        self._require_healthy()
        asked = list(requests)
        for request in asked:
            self._check(request)
        out: list[Trajectory] = []
        with ThreadPoolExecutor(max_workers=max(1, min(self.requests, len(asked)))) as pool:
            for done in pool.map(self._run, asked):
                out += done
                self.tokens_generated += sum(len(t.response_ids) for t in done)
                for trajectory in done if on_finish is not None else ():
                    on_finish(trajectory)  # type: ignore[misc]
        return out

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Nothing is recorded anyway."""
        yield

    def _run(self, request: Request) -> list[Trajectory]:
        first = self._ask(request, request.prompt_ids, request.first_sample, request.n, request.sampling.max_tokens)
        return [self._finished(request, request.first_sample + i, piece) for i, piece in enumerate(first)]

    def _finished(self, request: Request, sample: int, piece: Piece) -> Trajectory:
        """A sample whose first piece is here, continued where it was aborted."""
        pieces, aborts = [piece], 0
        while pieces[-1].finish == "abort":
            done = sum(len(p.ids) for p in pieces)
            aborts = 0 if len(pieces[-1].ids) else aborts + 1
            if aborts > _ABORTS:
                raise VllmError("a request is aborted again and again", where=self.client.url)
            ids = (*request.prompt_ids, *(i for p in pieces for i in p.ids.tolist()))
            pieces += self._ask(request, ids, sample, 1, request.sampling.max_tokens - done)
        return self._trajectory(request, sample, pieces)

    def _ask(self, request: Request, ids: tuple[int, ...], sample: int, n: int, budget: int) -> list[Piece]:
        sampling = request.sampling
        room = min(budget, self.max_length - len(ids))
        seed = seed_of(sampling.seed, request.key, len(ids)) + sample
        body = sampling_of(sampling, self.arch.eos_ids, n=n, seed=seed, max_tokens=room)
        with self._passing():
            answer = self.client.generate(ids, body)
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != n:
            raise VllmError(
                f"{len(choices) if isinstance(choices, list) else 0} choices", where=self.client.url, expected=f"{n}"
            )
        ordered = sorted(choices, key=lambda c: c.get("index", 0) if isinstance(c, dict) else 0)
        where = f"request group {request.group}"
        eos = () if sampling.ignore_eos else self.arch.eos_ids
        return [
            piece_of(
                choice,
                sampling=sampling,
                eos_ids=eos,
                vocab_size=self.arch.vocab_size,
                version=self.version,
                where=where,
            )
            for choice in ordered
        ]

    def _trajectory(self, request: Request, sample: int, pieces: list[Piece]) -> Trajectory:
        ids = np.concatenate([p.ids for p in pieces])
        kept = [row for p in pieces for row in p.supports or ()]
        routes = pieces[-1].routes
        total = len(request.prompt_ids) + len(ids) - 1
        whole = routes is not None and len(pieces) == 1 and routes.shape[0] == total
        trajectory = Trajectory(
            prompt_ids=np.array(request.prompt_ids, np.int32),
            response_ids=ids,
            logprobs=np.concatenate([p.logprobs for p in pieces]),
            mask=np.ones(len(ids), bool),
            versions=np.concatenate([p.versions for p in pieces]),
            sampling=request.sampling,
            precision=self.precision,
            finish_reason=pieces[-1].finish,
            group=request.group,
            sample=sample,
            routes=routes if whole else None,
            supports=list(kept) if kept else None,
        )
        trajectory.check(self.arch.vocab_size)
        return trajectory

    def _check(self, request: Request) -> None:
        where, ids = f"request group {request.group}", request.prompt_ids
        if not ids:
            raise DataError("an empty prompt", where=where, expected="at least one token", fix="add a BOS token")
        if len(ids) >= self.max_length:
            raise DataError(f"a prompt of {len(ids)} tokens", where=where, expected=f"fewer than {self.max_length}")
        if min(ids) < 0 or max(ids) >= self.arch.vocab_size:
            raise DataError(
                "a token id is outside the vocabulary", where=where, expected=f"0 <= id < {self.arch.vocab_size}"
            )

    @contextmanager
    def _passing(self) -> Iterator[None]:
        """One request on its way; none passes while weights change."""
        with self._gate:
            self._gate.wait_for(lambda: not self._closed)
            self._require_healthy()
            self._in_flight += 1
            self._gate.notify_all()
        try:
            yield
        finally:
            with self._gate:
                self._in_flight -= 1
                self._gate.notify_all()

    # ---- weights

    def connect(self, store: str, stamp: Stamp, *, options: Mapping[str, Any] | None = None) -> Updated:
        """Open the transfer engine on a refit store, as the server reaches it, and go to its HEAD.

        Raises:
            ConfigError: the server was started without halfbyte's transfer engine.
            RefitError, WrongWeightsError: see :meth:`update`.
        """
        if not self.workers or any(w.backend != BACKEND for w in self.workers):
            raise ConfigError(
                "the server cannot take weights from a refit store",
                where=self.client.url,
                expected=f'--worker-extension-cls {EXTENSION} --weight-transfer-config \'{{"backend": "{BACKEND}"}}\'',
                fix="install halfbyte in vLLM's environment and start the server with both (docs/vllm.md)",
            )
        with suppress(VllmError):  # an update that a killed trainer left open; refused where there is none
            self.client.finish_update(stamp.version)
        self.client.init_transfer({"store": store, "options": dict(options or {}), "run": stamp.run})
        return self.update(stamp)

    def update(self, stamp: Stamp) -> Updated:
        """Serve this version, the store's HEAD: pause, start, update, finish, resume, verify.

        Raises:
            RefitError: the server refused it and serves what it served.
            WrongWeightsError: it took it and holds something else, or is between two versions: it is paused, and this engine
                generates no more.
        """
        self._require_healthy()
        with self._closed_gate():
            try:
                started = time.perf_counter()
                self._take(stamp)
                pause = time.perf_counter() - started
                self._updates += 1
                due = self.verify_every and (self._updates == 1 or self._updates % self.verify_every == 0)
                done = verify(self.client, self.probes) if due else None
                return Updated(stamp, pause, done, tuple(self.client.rpc("halfbyte_last")))
            except VllmError as error:
                self._give_up()
                raise WrongWeightsError(
                    f"the update to version {stamp.version} broke off: {error.what}",
                    where=error.where,
                    fix="start the server again; its log says more",
                ) from error
            except WrongWeightsError:
                self._give_up()
                raise

    @contextmanager
    def _closed_gate(self) -> Iterator[None]:
        """Meanwhile no request passes, and none is in flight: those that were have ended with the tokens they had."""
        with self._gate:
            self._closed = True
        try:
            self.client.pause("abort")
            with self._gate:
                while not self._gate.wait_for(lambda: self._in_flight == 0, 0.2):
                    self.client.pause("abort")  # for one that reached the paused server after the first
            yield
        finally:
            with self._gate:
                self._closed = False
                self._gate.notify_all()

    def _take(self, stamp: Stamp) -> None:
        before = self._held()
        self.client.start_update()
        try:
            self.client.update({"version": stamp.version, "state": stamp.state})
        except VllmError as error:
            if before is None or self._held() != before:
                raise
            self.client.resume()
            raise RefitError(
                f"the server refused version {stamp.version} and serves the version it had: {error.what}",
                where=self.client.url,
            ) from error
        self.client.finish_update(stamp.version)
        self.client.reset_prefix_cache()
        held = self._held()
        if held != (stamp.run, stamp.version, stamp.state):
            raise WrongWeightsError(f"the server holds {held}", where=self.client.url, expected=str(stamp))
        self.stamp = stamp
        self.client.resume()

    def _give_up(self) -> None:
        self.healthy = False
        with suppress(VllmError):
            self.client.pause("abort")  # nobody else is to be served by it either

    def _held(self) -> tuple[str | None, int | None, str | None] | None:
        """What all workers hold; None where they differ."""
        found = {(w.run, w.version, w.state) for w in self._introduced()}
        return found.pop() if len(found) == 1 else None

    def _introduced(self) -> tuple[Handshake, ...]:
        rows = self.client.rpc("halfbyte_info")
        return tuple(Handshake.from_json(row, f"{self.client.url}, rank {i}") for i, row in enumerate(rows))

    def _meet(self) -> tuple[Handshake, ...]:
        try:
            self.client.rpc("halfbyte_info")
        except VllmError:
            return ()  # a plain server: it can generate
        workers = self._introduced()
        for worker in workers:
            expected = {"bfloat16": PRESETS["bf16"], "float32": PRESETS["fp32"]}.get(worker.dtype)
            if worker.quantization is None and expected is not None:
                require_same(expected, self.precision, where=f"{self.client.url} runs {worker.dtype}")
            if worker.device == "cpu" and worker.chunked_prefill:
                raise VllmError(
                    "on CPUs vLLM's engine dies when it cuts the prompt of a request that has a seed",
                    where=self.client.url,
                    expected="--no-enable-chunked-prefill",
                )
        return workers

    def _require_healthy(self) -> None:
        if not self.healthy:
            raise WrongWeightsError(
                "the server was found with wrong weights and serves no more",
                where=self.client.url,
                fix="start it again from a checkpoint",
            )
