"""What ``/metrics`` shows, in a registry of its own. Counters grow from the server's start."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from halfbyte.rollout.pages import PagePool
from halfbyte.serve.loop import Snapshot
from halfbyte.serve.memory import peak_resident_bytes, proportional_bytes, resident_bytes

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters that the event loop and the follower write, and gauges read from the engine at each look.

    Arguments:
        pool: the engine's page pool; only what never changes is read from it.
        snapshot: the engine now.
        labels: name -> text of ``halfbyte_info``.
    """

    def __init__(self, pool: PagePool, snapshot: Callable[[], Snapshot], labels: dict[str, str]) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "halfbyte_requests", "Requests by endpoint and outcome.", ("endpoint", "outcome"), registry=registry
        )
        self.prompt_tokens = Counter("halfbyte_prompt_tokens", "Prompt tokens of answered requests.", registry=registry)
        self.cached_tokens = Counter(
            "halfbyte_cached_prompt_tokens", "Those found in the prefix cache.", registry=registry
        )
        self.generated_tokens = Counter("halfbyte_generated_tokens", "Tokens of answered requests.", registry=registry)
        self.first_token = Histogram(
            "halfbyte_time_to_first_token_seconds",
            "From arrival to the first token drawn.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.latency = Histogram(
            "halfbyte_request_seconds", "From arrival to the last byte.", buckets=_SECONDS, registry=registry
        )
        self.refits = Counter("halfbyte_refits", "Refits by outcome: taken, failed.", ("outcome",), registry=registry)
        self.refit_failing = Gauge(
            "halfbyte_refit_failing", "1 while the last attempt to refit has failed.", registry=registry
        )
        self.active = Gauge("halfbyte_active_requests", "Requests being worked on.", registry=registry)
        self.queue = Gauge("halfbyte_queue_length", "Samples that wait for their turn.", registry=registry)
        info = Gauge("halfbyte_info", "What is served; always 1.", tuple(labels), registry=registry)
        info.labels(**labels).set(1)
        self.registry.register(_EngineCollector(pool, snapshot))
        for outcome in ("taken", "failed"):
            self.refits.labels(outcome)

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, pool: PagePool, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._pages, self._page_size = pool.n_pages, pool.page_size
        tensors = (t for layer in pool.layers for t in (layer.k, layer.v, layer.k_scales, layer.v_scales))
        self._kv_bytes = sum(t.nbytes for t in tensors if t is not None)

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        gauges = {
            "running_samples": ("Samples that draw tokens.", now.running),
            "kv_pages_used": ("KV pages that samples hold.", now.pages_used),
            "kv_pages_cached": ("KV pages kept for prompts to come; free when needed.", now.pages_cached),
            "kv_pages_total": ("KV pages.", self._pages),
            "kv_bytes": ("Bytes of the KV page pool.", self._kv_bytes),
            "kv_capacity_tokens": ("Tokens that the KV page pool holds.", self._pages * self._page_size),
            "weights_bytes": ("Bytes of the packed weights.", now.weights_bytes),
            "weight_version": ("Version that draws tokens.", now.version),
            "peak_resident_bytes": ("The most that was resident.", peak_resident_bytes()),
            "resident_bytes": ("Resident memory.", resident_bytes()),
            "proportional_bytes": ("Proportional set size.", proportional_bytes()),
        }
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"halfbyte_{name}", text, value=value)
        counters: dict[str, tuple[str, float]] = {
            "engine_steps": ("Forward passes.", now.steps),
            "engine_step_seconds": ("Seconds in forward passes.", now.step_seconds),
            "engine_tokens": ("Tokens drawn, also for requests that were given up.", now.tokens),
            "engine_faults": ("Forward passes that failed.", now.faults),
            "preemptions": ("Samples sent back to be recomputed.", now.preemptions),
            "pause_seconds": ("Seconds the engine rested for refits.", now.paused_seconds),
        }
        for name, (text, total) in counters.items():
            yield CounterMetricFamily(f"halfbyte_{name}", text, value=total)
