"""The native rollout engine: requests in, trajectories out.

A sample's tokens and log-probs are a function of (weights, precision, prompt, sampling, key, sample index) alone: the same
alone, in any batch, in any arrival order, for any page size, with shared prompt pages or without, preempted or not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halfbyte.errors import ConfigError, DataError, NumericsError
from halfbyte.formats import QuantTensor
from halfbyte.guidance.cache import PassRecord, Shelf
from halfbyte.guidance.layout import Layout
from halfbyte.guidance.plan import Plan
from halfbyte.kernels import Kernels, active
from halfbyte.models.architecture import Architecture
from halfbyte.models.decoder import logits as decoder_logits
from halfbyte.models.precision import Precision
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.collector import Collector
from halfbyte.rollout.draw import draw
from halfbyte.rollout.packed import PackedExecution, StepBatch
from halfbyte.rollout.pages import PagePool
from halfbyte.rollout.request import Request, Sample
from halfbyte.rollout.scheduler import Scheduler, Work
from halfbyte.rollout.stop import Detokeniser, find_stop
from halfbyte.rollout.weights import RolloutWeights

__all__ = ["Engine", "EngineOptions"]


@dataclass(frozen=True)
class EngineOptions:
    """Budgets.

    Arguments:
        max_batch_tokens: token rows in one forward pass.
        max_sequences: samples in one forward pass.
        kv_memory_mb: memory of the page pool, MiB.
        page_size: tokens a page, a multiple of 16.
        max_length: longest sequence; None takes the model's ``max_positions``.
        prefix_cache: reuse full pages of equal prompt beginnings within a weight version.
        share_prompts: compute the prompt of a request's ``n`` samples once.
    """

    max_batch_tokens: int = 4096
    max_sequences: int = 1024
    kv_memory_mb: float = 256.0
    page_size: int = 16
    max_length: int | None = None
    prefix_cache: bool = True
    share_prompts: bool = True

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_sequences", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} = {getattr(self, name)}", where=f"EngineOptions.{name}", expected="at least 1"
                )
        if not 0 < self.kv_memory_mb < math.inf or (self.max_length is not None and self.max_length < 1):
            raise ConfigError(
                f"kv_memory_mb = {self.kv_memory_mb}, max_length = {self.max_length}",
                where="EngineOptions",
                expected="positive numbers",
            )


class Engine:
    """Continuous batching over packed weights and a paged KV cache.

    Arguments:
        arch: the model's architecture.
        precision: what runs in which precision.
        tensors: published weights in checkpoint names.
        detokeniser: needed only for stop strings.
        version: the weight version of ``tensors``.
        guidance: what trajectories bring along for the learner's rounding; nothing by default.
        shelf: where the guidance of finished samples is kept; unlimited memory by default.
        codes: weights of ``tensors`` that are FP4 already (``Checkpoint.codes``) and packed as they are.
    """

    def __init__(
        self,
        arch: Architecture,
        precision: Precision,
        tensors: Mapping[str, Tensor],
        *,
        detokeniser: Detokeniser | None = None,
        options: EngineOptions | None = None,
        kernels: Kernels | None = None,
        version: int = 0,
        guidance: Plan | None = None,
        shelf: Shelf | None = None,
        codes: Mapping[str, QuantTensor] | None = None,
    ) -> None:
        self.arch, self.precision = arch, precision
        self.options = options or EngineOptions()
        self.kernels = kernels or active()
        self.detokeniser = detokeniser
        self.max_length = min(self.options.max_length or arch.max_positions, arch.max_positions)
        self.weights = self._pack(tensors, version, codes)
        per_page = PagePool.page_bytes(arch, precision, self.options.page_size)
        n_pages = int(self.options.kv_memory_mb * 2**20 // per_page) if per_page else 0
        # no more pages than the largest batch could ever fill: a small model does not reserve what it cannot use
        useful = self.options.max_sequences * 4 * -(-self.max_length // self.options.page_size)
        self.pool = PagePool(arch, precision, self.kernels, min(n_pages, useful), self.options.page_size)
        self.scheduler = Scheduler(
            self.pool,
            max_batch_tokens=self.options.max_batch_tokens,
            max_sequences=self.options.max_sequences,
            prefix_cache=self.options.prefix_cache,
        )
        self.tokens_generated = 0
        self.drawn: list[Sample] = []  # samples that the last step drew a token of
        self._order = 0
        self._samples: dict[int, Sample] = {}
        self._collector = Collector(self.pool, precision, shelf or Shelf())
        self.guide(guidance or Plan())

    @property
    def version(self) -> int:
        """The weight version that the next token will be stamped with."""
        return self.weights.version

    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Serve another version. Everything is packed and checked before anything is replaced; samples in flight are
        recomputed under the new weights and go on (their tokens keep the version that drew them).

        Raises:
            ConfigError: the version does not grow.
        """
        if version <= self.version:
            raise ConfigError(
                f"weight version {version} after {self.version}", where="load_weights", expected="a larger version"
            )
        self.swap(self._pack(tensors, version))

    def swap(self, weights: RolloutWeights) -> None:
        """Serve weights that are packed already: the commit of a refit, or its way back. Samples in flight are recomputed."""
        self.weights = weights
        self.scheduler.preempt_all()

    def guide(self, plan: Plan) -> None:
        """Record guidance by ``plan`` from now on.

        Raises:
            ConfigError: samples are in flight; their guidance would be cut in two.
        """
        if self.busy:
            raise ConfigError("samples are in flight", where="Engine.guide", expected="an idle engine")
        layout = Layout.of(self.arch, self.precision, plan)
        self.pool.record(layout if layout.fields else None)
        self.pool.forget_prefixes()  # their tokens were not recorded by this plan

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Generate without recording guidance, for responses that no learner will see.

        Raises:
            ConfigError: samples are in flight.
        """
        if self.busy:
            raise ConfigError("samples are in flight", where="Engine.unrecorded", expected="an idle engine")
        arena, self.pool.guidance = self.pool.guidance, None
        try:
            yield
        finally:
            self.pool.guidance = arena
            if arena is not None:
                self.pool.forget_prefixes()  # what they hold was not recorded

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Set the samples in flight aside: the engine is idle inside. They are recomputed afterwards and go on."""
        self.scheduler.preempt_all()
        samples, waiting = self._samples, self.scheduler.waiting
        self._samples, self.scheduler.waiting = {}, deque()
        try:
            yield
        finally:
            self._samples, self.scheduler.waiting = samples, waiting

    def check(self, request: Request) -> None:
        """Refuse what :meth:`add` refuses; for callers on other threads, too.

        Raises: see :meth:`add`.
        """
        where = f"request group {request.group}"
        if not request.prompt_ids:
            raise DataError("an empty prompt", where=where, expected="at least one token", fix="add a BOS token")
        if request.n < 1:
            raise ConfigError(f"n = {request.n}", where=where, expected="at least one sample")
        low, high = min(request.prompt_ids), max(request.prompt_ids)
        if low < 0 or high >= self.arch.vocab_size:
            raise DataError(
                f"token id {low if low < 0 else high} is outside the vocabulary",
                where=where,
                expected=f"0 <= id < {self.arch.vocab_size}",
                fix="use the tokenizer of this model",
            )
        length = len(request.prompt_ids) + request.sampling.max_tokens
        if length > self.max_length:
            raise DataError(
                f"prompt of {len(request.prompt_ids)} tokens and max_tokens {request.sampling.max_tokens} make {length}",
                where=where,
                expected=f"at most {self.max_length} positions",
                fix="shorten the prompt or lower max_tokens",
            )
        self.scheduler.check(length)
        if request.sampling.stop and self.detokeniser is None:
            raise ConfigError("stop strings need a tokenizer", where=where, fix="give the engine its tokenizer")

    def add(self, request: Request) -> list[Sample]:
        """Queue a request; its samples, to watch while they run.

        Raises:
            DataError: an empty or too long prompt, or a token id outside the vocabulary.
            ConfigError: stop strings without a tokenizer, or a sequence that cannot fit the KV memory.
        """
        self.check(request)
        stop_ids = set(request.sampling.stop_ids)
        if not request.sampling.ignore_eos:
            stop_ids |= set(self.arch.eos_ids)
        samples: list[Sample] = []
        leader: Sample | None = None
        for index in range(request.first_sample, request.first_sample + request.n):
            sample = Sample(request, index, self._order, list(request.prompt_ids), frozenset(stop_ids))
            samples.append(sample)
            self._samples[self._order] = sample
            self._order += 1
            if leader is None:
                self.scheduler.add(sample)
                leader = sample if self.options.share_prompts else None
            else:
                leader.forks.append(sample)
        return samples

    def withdraw(self, samples: Iterable[Sample]) -> None:
        """Take samples out of flight as they are; :meth:`restore` lets them go on."""
        for sample in samples:
            self._retire(sample)

    def restore(self, samples: Iterable[Sample]) -> None:
        """Let samples that were withdrawn, or that an error of :meth:`step` dropped, go on from the tokens they have."""
        for sample in samples:
            self._samples[sample.order] = sample
            self.scheduler.add(sample)

    def generate(
        self, requests: Iterable[Request], on_finish: Callable[[Trajectory], None] | None = None
    ) -> list[Trajectory]:
        """Run requests to their end; trajectories in order of request, then sample.

        Raises:
            ConfigError: requests added before are still in flight; their trajectories would be lost here.
        """
        if len(self._samples) > 0:
            raise ConfigError(
                f"{len(self._samples)} samples are in flight",
                where="Engine.generate",
                expected="an idle engine",
                fix="call step() until it is idle, or abort()",
            )
        requests = list(requests)
        for request in requests:
            self.check(request)
        first = self._order
        for request in requests:
            self.add(request)
        finished: dict[int, Trajectory] = {}
        while self.busy:
            for order, trajectory in self.step():
                finished[order] = trajectory
                if on_finish is not None:
                    on_finish(trajectory)
        return [finished[order] for order in range(first, self._order)]

    @property
    def busy(self) -> bool:
        """Whether any sample is waiting or running."""
        return bool(self._samples)

    def abort(self, group: int | None = None) -> list[Trajectory]:
        """Stop all samples, or those of a group; what they have produced so far comes back with finish reason ``abort``.

        Samples that have no token yet are dropped.
        """
        out = []
        for sample in [s for s in self._samples.values() if group is None or s.request.group == group]:
            sample.finish = "abort"
            if len(sample.tokens) > sample.prompt_length:
                out += self._collector.collect([sample], self.version)
            self._retire(sample)
        return out

    def step(self) -> list[tuple[int, Trajectory]]:
        """One forward pass; returns (order of arrival, trajectory) of the samples that finished in it.

        Raises:
            NumericsError: an activation or logit is not finite. After any error the engine is idle: samples in flight are
                dropped and their pages are free.
        """
        self.drawn = []
        try:
            with torch.inference_mode():
                return self._step()
        except BaseException:
            for sample in list(self._samples.values()):
                sample.forks = []
                self._retire(sample)
            raise

    def _step(self) -> list[tuple[int, Trajectory]]:
        work = self.scheduler.schedule(self.version)
        if not work:
            return []
        batch = self._batch(work)
        logits = self._forward(batch)
        drawing: list[Sample] = []
        rows: list[int] = []
        row = 0
        for item in work:
            sample = item.sample
            completes = item.completes
            sample.computed += item.count
            if self.options.prefix_cache and sample.computed - item.count < sample.prompt_length:
                self._register(sample)
            if completes:
                for each in (sample, *self.scheduler.fork(sample)):
                    drawing.append(each)
                    rows.append(row)
                row += 1
        if not drawing:
            return []
        self._draw(drawing, logits.index_select(0, torch.tensor(rows)), batch)
        self.drawn = drawing
        done = [sample for sample in drawing if sample.finish is not None]
        trajectories = self._collector.collect(done, self.version)
        for sample in done:
            self._retire(sample)
        return [(sample.order, trajectory) for sample, trajectory in zip(done, trajectories)]

    @torch.inference_mode()
    def score(
        self,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        supports: Sequence[npt.NDArray[np.int32] | None] | None = None,
        generated: Sequence[bool] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Teacher-forced log-probs [R] float32 of a response, by the same execution; bit-equal to those of sampling it.

        ``generated`` [P + R] says which tokens run in decode precision; by default those of the response.
        """
        sampling = sampling or SamplingParams()
        tokens = [*prompt_ids, *response_ids]
        flags = generated or [i >= len(prompt_ids) for i in range(len(tokens))]
        request = Request(tuple(tokens[:-1]), SamplingParams(max_tokens=1), generated=tuple(flags[:-1]))
        self.check(request)
        sample = Sample(request, 0, -1, list(request.prompt_ids), frozenset())
        scheduler = Scheduler(
            self.pool,
            max_batch_tokens=self.options.max_batch_tokens,
            max_sequences=1,
            prefix_cache=False,
        )
        scheduler.add(sample)
        collected: list[Tensor] = []
        try:
            while sample.computed < len(sample.tokens):
                work = scheduler.schedule(self.version)
                if not work:
                    raise ConfigError("no KV page is free", where="Engine.score", fix="score when the engine is idle")
                start = sample.computed
                wanted = [i for i in range(work[0].count) if start + i >= len(prompt_ids) - 1]
                collected.append(self._forward(self._batch(work, rows=wanted), recording=False))
                sample.computed += work[0].count
        finally:
            scheduler.remove(sample)
        count = len(response_ids)
        lists = [None if s is None else torch.as_tensor(s, dtype=torch.int64) for s in supports] if supports else None
        out = self.kernels.token_logprobs(
            torch.cat(collected),
            torch.tensor(list(response_ids), dtype=torch.int64),
            torch.full((count,), sampling.temperature, dtype=torch.float32),
            lists,
        )
        return out.numpy()

    def _pack(
        self, tensors: Mapping[str, Tensor], version: int, codes: Mapping[str, QuantTensor] | None = None
    ) -> RolloutWeights:
        return RolloutWeights.pack(
            self.arch, self.precision, tensors, self.kernels, version=version, n_positions=self.max_length, codes=codes
        )

    def _batch(self, work: list[Work], rows: list[int] | None = None) -> StepBatch:
        size = self.pool.page_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, lengths = [0], []
        last_rows: list[int] = []
        for item in work:
            s, begin, end = item.sample, item.sample.computed, item.sample.computed + item.count
            ids += s.tokens[begin:end]
            positions += range(begin, end)
            slots += [s.pages[p // size] * size + p % size for p in range(begin, end)]
            starts.append(len(ids))
            lengths.append(end)
            if item.completes:
                last_rows.append(len(ids) - 1)
        table = np.zeros((len(work), max(len(w.sample.pages) for w in work)), dtype=np.int32)
        for i, item in enumerate(work):
            table[i, : len(item.sample.pages)] = item.sample.pages
        generated = None
        if self.precision.phased:
            generated = torch.tensor(
                [w.sample.is_generated(p) for w in work for p in range(w.sample.computed, w.sample.computed + w.count)]
            )
        return StepBatch(
            ids=torch.tensor(ids, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            slots=torch.tensor(slots, dtype=torch.int64),
            page_table=torch.from_numpy(table),
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_length=torch.tensor(lengths, dtype=torch.int32),
            generated=generated,
            rows=torch.tensor(last_rows if rows is None else rows, dtype=torch.int64),
        )

    def _forward(self, batch: StepBatch, *, find_fault: bool = False, recording: bool = True) -> Tensor:
        record = None
        if recording and self.pool.guidance is not None:
            record = PassRecord(self.pool.guidance, batch.slots)
        run = PackedExecution(self.weights, self.pool, self.kernels, batch, find_fault=find_fault, record=record)
        out = decoder_logits(self.arch, run, batch.ids, batch.rows)
        if record is not None:
            record.commit(self.kernels)
        return out

    def _draw(self, samples: list[Sample], logits: Tensor, batch: StepBatch) -> None:
        try:
            draw(self.kernels, samples, logits, self.version)
        except NumericsError:
            self._forward(batch, find_fault=True)  # names the layer and token, if a layer is to blame
            raise
        for sample in samples:
            self._decide(sample)
        self.tokens_generated += len(samples)

    def _decide(self, sample: Sample) -> None:
        sampling = sample.request.sampling
        last, length = sample.tokens[-1], len(sample.tokens) - sample.prompt_length
        if last in sample.stop_ids:
            sample.finish = "eos" if last in self.arch.eos_ids else "stop"
        elif (
            sampling.stop
            and self.detokeniser is not None
            and find_stop(self.detokeniser, sample.tokens, length, sampling.stop)
        ):
            sample.finish = "stop"
        elif length >= sampling.max_tokens:
            sample.finish = "length"

    def _register(self, sample: Sample) -> None:
        """Offer the prompt's full pages to later prompts; generated pages are not worth a digest for every token."""
        full = min(sample.computed, sample.prompt_length) // self.pool.page_size
        if full <= sample.registered:
            return
        if len(sample.digests) < full:
            phases = sample.phases(full * self.pool.page_size, self.pool)
            sample.digests = self.pool.digests(self.version, sample.tokens, full, phases)
        for i in range(sample.registered, full):
            self.pool.register(sample.digests[i], sample.pages[i])
        sample.registered = full

    def _retire(self, sample: Sample) -> None:
        self.scheduler.remove(sample)
        del self._samples[sample.order]
        if sample.forks:  # an aborted leader: its forks lose their prompt, the first of them takes over
            heir, *rest = sample.forks
            heir.forks, sample.forks = rest, []
            self.scheduler.waiting.appendleft(heir)
