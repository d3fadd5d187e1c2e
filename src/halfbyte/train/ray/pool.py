"""The workers of a run: started, watched, replaced when they die, and more or fewer of them when that is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

from halfbyte.errors import ClusterError
from halfbyte.train.ray.balance import Load
from halfbyte.train.ray.cluster import Cluster, WorkerDied
from halfbyte.train.ray.events import Events
from halfbyte.train.ray.messages import Hello, Played, WorkerSpec
from halfbyte.train.ray.worker import RolloutWorker

__all__ = ["Pool", "Worker", "actor_options"]

#: So often in a row a worker may die before it has finished anything.
PATIENCE = 5
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a worker that dies again and again is started again


def actor_options(resources: Mapping[str, float], environ: Mapping[str, str]) -> dict[str, Any]:
    """Ray's options for ``rollout.resources``: ``CPU`` (1 by default), ``GPU``, ``memory`` (bytes), and resources of one's own.

    A worker has a thread for each of its CPUs, waiting as the run's threads do (``environ``: the run's environment).
    """
    own = dict(resources)
    cpus = own.pop("CPU", 1.0)
    threads = str(max(1, int(cpus)))
    variables = {"OMP_NUM_THREADS": threads, "HALFBYTE_THREADS": threads}
    variables |= {name: environ[name] for name in ("OMP_WAIT_POLICY", "HALFBYTE_KERNELS") if name in environ}
    options: dict[str, Any] = {
        "num_cpus": cpus,
        "runtime_env": {"env_vars": variables},
        "concurrency_groups": {"play": 1, "weights": 1},
    }
    if "GPU" in own:
        options["num_gpus"] = own.pop("GPU")
    if "memory" in own:
        options["memory"] = int(own.pop("memory"))
    return options | ({"resources": own} if own else {})


@dataclass(eq=False)
class Worker:
    """A worker as the run sees it.

    Arguments:
        slot: its place; whoever replaces it takes the place over.
        opening: the result of ``open``, None once it is open.
        sent: bundles sent to it. bound: the last of them that must be finished before its weights may change.
    """

    name: str
    slot: int
    actor: Any
    opening: Any
    load: Load
    sent: int = 0
    bound: int = 0
    leaving: bool = False
    hello: Hello | None = None
    bundles: set[Any] = field(default_factory=set)  # results that are due
    last: Played | None = None  # what it brought last


class Pool:
    """Keeps ``wanted`` workers.

    Arguments:
        spec: what each is told. options: Ray's, see :func:`actor_options`. capacity: samples that one runs at once.
        events: where it is written down.
        start_patience: seconds until the first worker must be open.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: WorkerSpec,
        wanted: int,
        *,
        options: Mapping[str, Any],
        capacity: int,
        events: Events,
        start_patience: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cluster, self.spec, self.wanted, self.events, self.clock = cluster, spec, wanted, events, clock
        self.options, self.capacity = dict(options), capacity
        self.start_patience = start_patience
        self.workers: list[Worker] = []
        self.closed = False
        self._deaths: dict[int, int] = {}  # slot -> in a row
        self._not_before: dict[int, float] = {}  # slot -> when it may be started again
        self._started = 0
        self._empty_since = clock()

    @property
    def open(self) -> list[Worker]:
        """Workers that play."""
        return [w for w in self.workers if w.opening is None]

    @property
    def takers(self) -> list[Worker]:
        """Workers that may be given more."""
        return [w for w in self.open if not w.leaving]

    def tend(self) -> None:
        """Start what is missing, let go of what is too much.

        Raises:
            ClusterError: for long there has been no worker at all.
        """
        staying = sorted((w for w in self.workers if not w.leaving), key=lambda w: w.slot)
        for worker in staying[self.wanted :]:
            worker.leaving = True
        for worker in [w for w in self.workers if w.leaving and not w.bundles]:
            self._remove(worker, "left")
        taken = {w.slot for w in staying[: self.wanted]}
        free = (slot for slot in count() if slot not in taken)
        for slot in islice(free, self.wanted - len(taken)):
            if self.clock() >= self._not_before.get(slot, 0.0):
                self._start(slot)
        if self.open:
            self._empty_since = self.clock()
        elif self.clock() - self._empty_since > self.start_patience:
            raise ClusterError(
                f"no worker has started for {self.start_patience:.0f} s",
                where=f"each wants {_words(self.options)}; the cluster has {self.cluster.offers()}",
                expected="room for one worker at least",
                fix="lower rollout.resources, or add machines",
            )

    def opened(self, ref: Any) -> None:
        """The result of an ``open`` is there.

        Raises:
            UserError: the worker cannot play, and no other could.
        """
        worker = next(w for w in self.workers if w.opening is ref)
        try:
            worker.hello = self.cluster.value(ref)
        except WorkerDied as error:
            self.died(worker, error)
            return
        worker.opening = None
        hello = worker.hello
        assert hello is not None
        facts = {"node": hello.node, "pid": hello.pid, "version": hello.version, "kernels": hello.kernels}
        self.events.add("open", worker.name, **facts)

    def died(self, worker: Worker, error: Exception) -> None:
        """A worker is gone. Its place is filled again, at once the first time, later if it happens again and again.

        Raises:
            ClusterError: it happens too often.
        """
        if worker not in self.workers:
            return  # another of its results has told
        self._remove(worker, "died", reason=str(error))
        self._empty_since = self.clock()
        times = self._deaths[worker.slot] = self._deaths.get(worker.slot, 0) + 1
        if times > PATIENCE:
            raise ClusterError(
                f"a rollout worker died {times} times in a row before it finished anything: {error}",
                where=worker.name,
                fix="the worker's log (under Ray's session folder, on its node) says more; out of memory is the usual cause",
            )
        pause = 0.0 if times == 1 else min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (times - 2))
        self._not_before[worker.slot] = self.clock() + pause

    def finished(self, worker: Worker) -> None:
        """A worker has brought something: it is sound."""
        self._deaths.pop(worker.slot, None)

    def close(self) -> None:
        """End all workers."""
        if not self.closed:
            self.closed = True
            for worker in list(self.workers):
                self._remove(worker, "closed")

    def _start(self, slot: int) -> None:
        self._started += 1
        name = f"worker-{slot}.{self._started}"
        actor = self.cluster.actor(RolloutWorker, self.options, name)
        opening = actor.open.remote(self.spec)
        self.workers.append(Worker(name, slot, actor, opening, Load(self.capacity)))
        self.events.add("start", name)

    def _remove(self, worker: Worker, event: str, **facts: Any) -> None:
        self.workers.remove(worker)
        self.cluster.kill(worker.actor)
        last = worker.last or Played()
        cost = {
            "refits": last.refits,
            "fetched_bytes": last.fetched_bytes,
            "refit_seconds": round(last.refit_seconds, 3),
        }
        self.events.add(event, worker.name, **cost, **facts)


def _words(options: Mapping[str, Any]) -> str:
    names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    flat = {names[k]: v for k, v in options.items() if k in names} | dict(options.get("resources", {}))
    return ", ".join(f"{name} {amount:g}" for name, amount in flat.items())
