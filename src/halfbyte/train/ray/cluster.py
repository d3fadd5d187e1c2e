"""Ray as the run sees it: a cluster that it joins, or one of its own on this machine. The only file that imports ray.

Ray ends a process that has lost the cluster's head for a minute, without a Python error. The run looks at the head itself, says
what happened and writes its checkpoint first.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from halfbyte.errors import ClusterError, DataError, MissingExtraError, UserError

__all__ = ["Cluster"]

#: Set for processes of ours, unless the user has: no statistics to Ray's makers; the driver's own watch speaks first; and
#: workers as nice as the run (Ray adds 15 to its workers: beside a busy trainer they would hardly run at all).
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
    "RAY_worker_niceness": "0",
}
#: On one machine processors are logical: any number of workers starts, and the system shares the real ones out.
_PLENTY = 256
#: Starts of Ray here before the run gives up. Each has 30 s, a constant of Ray's: short on a busy machine.
_ATTEMPTS = 6


class Cluster:
    """A connection to Ray; leaves it as it was found.

    Arguments:
        address: of a head (``host:port``, or ``auto`` on a node of the cluster); None starts Ray here, until :meth:`close`.
        memory_mb: shared memory for trajectories in transit where Ray is started here, MiB; Ray puts what is more into files.
        resources: names of resources that workers ask for, so that a cluster of our own has them.
        patience: seconds that the head may be out of reach; of a cluster of our own, whose head does not come back, at most 5.

    Raises:
        MissingExtraError: ray is not installed.
        ClusterError: no cluster answers there.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        memory_mb: float = 384.0,
        resources: Sequence[str] = (),
        patience: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            self.ray: Any = importlib.import_module("ray")
            self.errors: Any = importlib.import_module("ray.exceptions")
        except ImportError as error:
            raise MissingExtraError(
                "ray is not installed", where='rollout.backend = "ray"', fix="pip install 'halfbyte[ray]'"
            ) from error
        if address is not None and address.startswith("ray://"):
            raise ClusterError(
                f"{address} is a client's address",
                where="--ray-address",
                expected="the run on a node of the cluster, which shares memory with it: host:port, or auto",
                fix="start halfbyte on a node (ray job submit does), with --ray-address auto",
            )
        self.clock, self.patience = clock, patience
        self.ours = not self.ray.is_initialized()
        self.alone = self.ours and address is None
        if self.alone:
            self.patience = min(patience, 5.0)
        if self.ours:
            self._connect(address, memory_mb, resources)
        self.head = str(self.ray.get_runtime_context().gcs_address)
        self._seen = clock()

    def _connect(self, address: str | None, memory_mb: float, resources: Sequence[str]) -> None:
        options: dict[str, Any] = {
            "address": address or "local",
            "log_to_driver": False,
            "logging_level": logging.ERROR,
        }
        if address is None:
            own = {name: float(_PLENTY) for name in resources}
            memory = int(max(memory_mb, 128.0) * 2**20)
            options |= {
                "include_dashboard": False,
                "num_cpus": _PLENTY,
                "resources": own,
                "object_store_memory": memory,
            }
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self.ray.init(**options)
                return
            except Exception as error:  # Ray raises whatever it meets
                if address is None and attempt < _ATTEMPTS:
                    with suppress(Exception):
                        self.ray.shutdown()
                    continue
                self._say_why(error, address)

    def _say_why(self, error: Exception, address: str | None) -> NoReturn:
        raise ClusterError(
            f"Ray does not start or answer: {_first_line(error)}",
            where=address or "this machine",
            expected="a running head, the Ray version of its nodes, and its token (RAY_AUTH_TOKEN or ~/.ray/auth_token)",
            fix="ray status --address HOST:PORT shows what the cluster says",
        ) from error

    @property
    def address(self) -> str:
        """This node's address, as other nodes reach it."""
        return str(self.ray.util.get_node_ip_address())

    def check(self) -> None:
        """Look at the head.

        Raises:
            ClusterError: it has been out of reach for longer than ``patience``.
        """
        host, _, port = self.head.rpartition(":")
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=2.0):
            self._seen = self.clock()
            return
        gone = self.clock() - self._seen
        if gone > self.patience:
            raise ClusterError(
                f"the head of the Ray cluster has not answered for {gone:.0f} s",
                where=self.head,
                fix="bring the cluster up again; the same command with --resume goes on from the last checkpoint",
            )

    def actor(self, kind: type, options: Mapping[str, Any], *arguments: Any) -> Any:
        """A new actor of class ``kind``; it is not restarted by Ray, and dies with this process."""
        plain = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": "SPREAD"}
        made = dict(options)
        groups = made.pop("concurrency_groups", None)  # Ray takes these with the class
        remote = self.ray.remote(concurrency_groups=groups)(kind) if groups else self.ray.remote(kind)
        return remote.options(**plain, **made).remote(*arguments)

    def call(self, method: Any, group: str, *arguments: Any) -> Any:
        """Call an actor's method in one of its concurrency groups; the result is due.

        Raises:
            DataError: an argument that cannot be sent.
        """
        try:
            return method.options(concurrency_group=group).remote(*arguments)
        except (TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"a prompt cannot be sent to a worker: {_first_line(error)}",
                where="env.name",
                expected="answers and metadata of plain values",
                fix="keep open files, locks and local functions out of Prompt",
            ) from error

    def wait(self, refs: Sequence[Any], seconds: float) -> list[Any]:
        """Those results that are there, or the first to come within ``seconds``."""
        done, rest = self.ray.wait(list(refs), timeout=seconds)
        if done and rest:
            more, _ = self.ray.wait(rest, num_returns=len(rest), timeout=0)
            done += more
        return list(done)

    def value(self, ref: Any) -> Any:
        """A result that is there. Arrays in it are read-only views of the object store.

        Raises:
            UserError: the call raised it. WorkerDied: the worker, its node or its result is gone.
        """
        try:
            return self.ray.get(ref)
        except self.errors.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise
        except (self.errors.RayActorError, self.errors.ObjectLostError, self.errors.WorkerCrashedError) as error:
            raise WorkerDied(_first_line(error)) from error

    def kill(self, actor: Any) -> None:
        """End an actor at once."""
        with suppress(Exception):  # it may be gone, and so may the cluster
            self.ray.kill(actor, no_restart=True)

    def offers(self) -> str:
        """What the cluster has, in words."""
        with suppress(Exception):
            found = {
                k: v for k, v in self.ray.cluster_resources().items() if not k.startswith(("node:", "object_store"))
            }
            return ", ".join(f"{name} {amount:g}" for name, amount in sorted(found.items()))
        return "unknown"

    def close(self) -> None:
        """End what was started here."""
        if self.ours and self.ray.is_initialized():
            with suppress(Exception):
                self.ray.shutdown()


class WorkerDied(Exception):
    """An actor, or what it has returned, is gone; the message says why."""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
