"""Continuous batching: which sample computes how many tokens in the next forward pass.

Running samples decode one token each; the rest of the token budget goes to prefill, in arrival order and in chunks. When pages
run out the latest arrival gives its pages back and is recomputed later; batch-invariant kernels make that invisible in
the numbers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from halfbyte.errors import ConfigError
from halfbyte.rollout.pages import PagePool
from halfbyte.rollout.request import Sample

__all__ = ["Scheduler", "Work"]


@dataclass(frozen=True)
class Work:
    """``count`` tokens of a sample to compute, from ``sample.computed`` on."""

    sample: Sample
    count: int

    @property
    def completes(self) -> bool:
        """Whether the pass reaches the sample's last token, so that the next one can be drawn."""
        return self.sample.computed + self.count == len(self.sample.tokens)


class Scheduler:
    """Waiting and running samples.

    Arguments:
        max_batch_tokens: token rows in one forward pass.
        max_sequences: samples in one forward pass.
        prefix_cache: reuse full pages of equal prompt beginnings.
    """

    def __init__(self, pool: PagePool, *, max_batch_tokens: int, max_sequences: int, prefix_cache: bool) -> None:
        self.pool, self.prefix_cache = pool, prefix_cache
        self.max_batch_tokens, self.max_sequences = max_batch_tokens, max_sequences
        self.waiting: deque[Sample] = deque()
        self.running: dict[int, Sample] = {}  # by order of arrival
        self.preemptions = 0

    def check(self, length: int) -> None:
        """Refuse a sequence of up to ``length`` tokens that could never fit into the page pool, even alone.

        Raises:
            ConfigError: it could not.
        """
        needed = -(-length // self.pool.page_size)
        if needed > self.pool.n_pages:
            raise ConfigError(
                f"a sequence of up to {length} tokens needs {needed} KV pages, the pool has {self.pool.n_pages}",
                where="rollout.kv_memory_mb",
                expected="room for at least one whole sequence",
                fix="raise rollout.kv_memory_mb, or lower max_tokens",
            )

    def add(self, sample: Sample) -> None:
        """Queue a sample.

        Raises:
            ConfigError: see :meth:`check`.
        """
        self.check(len(sample.request.prompt_ids) + sample.request.sampling.max_tokens)
        self.waiting.append(sample)

    def remove(self, sample: Sample) -> None:
        """Forget a finished or aborted sample and give its pages back."""
        if self.running.pop(sample.order, None) is None and sample in self.waiting:
            self.waiting.remove(sample)
        self._release(sample)

    def preempt_all(self) -> None:
        """Send every running sample back to be recomputed (after a weight update: KV belongs to one version)."""
        for _, sample in sorted(self.running.items(), reverse=True):
            self._preempt(sample)
        for sample in self.waiting:
            self._release(sample)
        self.pool.forget_prefixes()

    def fork(self, leader: Sample) -> list[Sample]:
        """Start the other samples of a prompt on the pages the leader has just computed."""
        for sample in leader.forks:
            sample.pages = list(leader.pages)
            sample.computed = leader.computed
            sample.registered, sample.digests = leader.registered, list(leader.digests)
            self.pool.share(sample.pages)
            self.running[sample.order] = sample
        forks, leader.forks = leader.forks, []
        return forks

    def schedule(self, version: int) -> list[Work]:
        """The next forward pass; empty when there is nothing to do. Pages for all its tokens are allocated and private."""
        work: list[Work] = []
        budget = self.max_batch_tokens
        for order in sorted(self.running)[: self.max_sequences]:
            sample = self.running.get(order)
            if sample is None:  # preempted for an earlier one
                continue
            if budget == 0:
                break
            count = min(budget, len(sample.tokens) - sample.computed)
            if self._reserve(sample, count):
                work.append(Work(sample, count))
                budget -= count
        while self.waiting and budget > 0 and len(work) < self.max_sequences:
            sample = self.waiting[0]
            if not sample.pages:
                self._attach_prefix(sample, version)
            count = min(budget, len(sample.tokens) - sample.computed)
            if not self._room(sample, count):
                self._release(sample)
                break
            self.waiting.popleft()
            self.running[sample.order] = sample
            reserved = self._reserve(sample, count)
            assert reserved, "room was checked"
            if sample.cached is None:
                sample.cached = sample.computed
            work.append(Work(sample, count))
            budget -= count
        self.pool.flush_copies()
        return [w for w in work if w.sample.order in self.running]

    def _attach_prefix(self, sample: Sample, version: int) -> None:
        if not self.prefix_cache:
            return
        full = (len(sample.tokens) - 1) // self.pool.page_size  # the last token is always computed, for its logits
        sample.digests = self.pool.digests(
            version, sample.tokens, full, sample.phases(full * self.pool.page_size, self.pool)
        )
        sample.pages = self.pool.match(sample.digests)
        sample.registered = len(sample.pages)
        sample.computed = len(sample.pages) * self.pool.page_size

    def _room(self, sample: Sample, count: int) -> bool:
        needed = -(-(sample.computed + count) // self.pool.page_size) - len(sample.pages)
        return needed <= self.pool.available

    def _reserve(self, sample: Sample, count: int) -> bool:
        """Make the pages of the next ``count`` tokens exist and private; preempt later samples when the pool is full."""
        size = self.pool.page_size
        if count == 1:  # the common case of decoding into a page of one's own
            index = sample.computed // size
            if index < len(sample.pages) and self.pool.private(sample.pages[index]):
                return True
        first, last = sample.computed // size, (sample.computed + count - 1) // size
        for index in range(first, last + 1):
            while True:
                page = self.pool.writable(sample.pages[index]) if index < len(sample.pages) else self.pool.allocate()
                if page is not None:
                    break
                latest = self.running[max(self.running)]
                self._preempt(latest)
                if latest is sample:
                    return False
            if index < len(sample.pages):
                sample.pages[index] = page
            else:
                sample.pages.append(page)
        return True

    def _preempt(self, sample: Sample) -> None:
        self.preemptions += 1
        self.pool.flush_copies()  # before a freed page can become the target of another copy
        del self.running[sample.order]
        self._release(sample)
        self.waiting.appendleft(sample)

    def _release(self, sample: Sample) -> None:
        self.pool.release(sample.pages)
        sample.pages, sample.computed, sample.registered = [], 0, 0
