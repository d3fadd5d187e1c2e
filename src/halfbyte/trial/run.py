"""The run (and the A/A pilot): blocks in order, servers up and down, one record a request, resumable at any moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TypeAlias

from halfbyte.trial.blocks import BlockRecord, SegmentRecord
from halfbyte.trial.canonical import digest
from halfbyte.trial.client import Client, Reply, open_client
from halfbyte.trial.errors import UnavailableError
from halfbyte.trial.folder import TrialFolder
from halfbyte.trial.integrity import Finding, assess, problems
from halfbyte.trial.journal import Journal
from halfbyte.trial.memory_probe import MemoryProbe
from halfbyte.trial.records import ARMS, Arm, Phase, Record
from halfbyte.trial.requests import path_of, request_body, request_digest
from halfbyte.trial.schedule import Block, Segment, Slot
from halfbyte.trial.scorers import Response, Scorer, make_scorers, score
from halfbyte.trial.targets import Server
from halfbyte.trial.tasks import Task
from halfbyte.trial.tool_calls import parsed_calls

__all__ = ["Say", "execute", "seed_of"]

Say: TypeAlias = Callable[[str], None]
#: In the A/A pilot, and only where sampling is random, the second copy gets other seeds: with the same ones it would only show
#: that the server repeats itself, not how far two samples of the same model lie apart.
_PILOT_SEEDS = 1_000_003
_WARMUP = "Count from one to ten in words."


async def execute(folder: TrialFolder, phase: Phase, genesis: str, say: Say) -> list[Finding]:
    """Run what is missing of a phase; returns the integrity problems that stopped it, none if it is complete.

    Raises:
        UnavailableError: a server does not come up. The finished blocks are kept; call again.
        IntegrityError: the records so far are not what was recorded.
    """
    with folder.alone():
        scorers = make_scorers(folder.tasks, folder.path)
        journal = Journal(folder.records(phase), folder.blocks(phase), folder.abandoned(phase), genesis)
        try:
            schedule = folder.schedule(phase)
            if journal.abandoned:
                say(f"block {len(journal.finished)} was cut short: its {journal.abandoned} records are set aside")
            run = folder.settings.run
            if found := problems(assess(folder, phase, journal.records, journal.finished)):
                return found
            async with open_client(run.timeout, run.retries) as client, AsyncExitStack() as stack:
                worker = _Worker(folder, phase, client, scorers)
                stack.push_async_callback(worker.stop)
                for block in schedule[len(journal.finished) :]:
                    clock = time.monotonic()
                    await _block(worker, block, journal)
                    failed = sum(record.error is not None for record in journal.records[-_size(block) :])
                    say(
                        f"block {block.number + 1}/{len(schedule)} {block.order}: {_size(block)} requests, {failed} failed, "
                        f"{time.monotonic() - clock:.1f} s"
                    )
                    if found := problems(assess(folder, phase, journal.records, journal.finished)):
                        return found
        finally:
            journal.close()
    return []


def seed_of(base: int, slot: Slot, phase: Phase, temperature: float) -> int:
    """The sampling seed of a request: base + repeat, in both arms; see ``_PILOT_SEEDS``."""
    other = phase == "pilot" and slot.arm == "candidate" and temperature > 0
    return (base + slot.repeat + (_PILOT_SEEDS if other else 0)) % 2**31


def _size(block: Block) -> int:
    return sum(len(segment.slots) for segment in block.segments)


async def _block(worker: _Worker, block: Block, journal: Journal) -> None:
    segments = [await worker.segment(segment, journal.write) for segment in block.segments]
    # records, end, chain and abandoned are the journal's to fill in
    journal.commit(BlockRecord(worker.phase, block.number, block.order, tuple(segments), 0, 0, "", 0))


class _Worker:
    """Servers and what it takes to serve a segment."""

    def __init__(self, folder: TrialFolder, phase: Phase, client: Client, scorers: dict[str, Scorer]) -> None:
        self.phase: Phase = phase
        self._settings, self._client, self._scorers = folder.settings, client, scorers
        self._tasks: dict[str, Task] = {task.id: task for task in folder.tasks}
        # In the pilot both arms are the baseline, and its target is one server.
        arms: Sequence[Arm] = ARMS if phase == "run" else ("baseline",)
        self._servers = {arm: Server(arm, folder.settings.target(arm), folder.path, client) for arm in arms}

    async def stop(self) -> None:
        """Stop all servers that were started."""
        for server in self._servers.values():
            await server.stop()

    async def segment(self, segment: Segment, write: Callable[[Record], None]) -> SegmentRecord:
        """Serve a segment and write its records."""
        server = self._servers[segment.arm if self.phase == "run" else "baseline"]
        start_seconds, cache = await self._ready(server)
        before = await server.figures()
        bodies = [self._body(slot, server) for slot in segment.slots]
        replies: dict[int, Reply] = {}
        started, clock = time.time(), time.perf_counter()
        with MemoryProbe(server.pid) as probe:
            path, concurrency = path_of(self._settings), self._settings.run.concurrency
            await self._client.ask_all(server.endpoint, path, bodies, concurrency, replies.__setitem__)
            seconds = time.perf_counter() - clock
        after = await server.figures()
        for index, slot in enumerate(segment.slots):  # scored now, so that no scorer holds up a response
            write(self._record(slot, bodies[index], replies[index]))
        engine = after.weights_bytes is not None
        return SegmentRecord(
            arm=segment.arm,
            requests=len(segment.slots),
            started=started,
            seconds=seconds,
            start_seconds=start_seconds,
            cache=cache,
            before=before,
            after=after,
            peak_bytes=probe.peak_bytes,
            memory_source=f"engine metrics + {probe.source}" if engine and probe.source != "remote" else probe.source,
            server=server.version,
        )

    async def _ready(self, server: Server) -> tuple[float | None, str]:
        """Have this server up (alone, if only one fits) and its prefix cache as the settings want it."""
        run, start_seconds, cache = self._settings.run, None, "kept"
        if run.exclusive:
            for other in self._servers.values():
                if other is not server:
                    await other.stop()
        if run.prefix_cache == "reset" and server.up:
            if await server.reset_cache():
                cache = "reset"
            elif server.target.started:
                await server.stop()
            else:
                raise UnavailableError(
                    f"the {server.name} server has no endpoint that empties its prefix cache",
                    where=server.endpoint.root,
                    fix='switch its cache off and set run.prefix_cache = "off", or "measure" it',
                )
        if not server.up:
            await server.stop()  # reaps one that has died
            start_seconds = await server.start()
            cache = "restart" if server.target.started else await self._first_cache(server)
            for _ in range(run.warmup):
                body = request_body(self._settings, _warmup_task(), 0, server.endpoint.model) | {"max_tokens": 8}
                await self._client.ask(server.endpoint, path_of(self._settings), body)
        return start_seconds, cache

    async def _first_cache(self, server: Server) -> str:
        """A URL's cache may be warm from earlier users when the trial first meets it."""
        return "reset" if self._settings.run.prefix_cache == "reset" and await server.reset_cache() else "kept"

    def _body(self, slot: Slot, server: Server) -> dict[str, object]:
        sampling = self._settings.sampling
        seed = seed_of(sampling.seed, slot, self.phase, sampling.temperature)
        return request_body(self._settings, self._tasks[slot.task], seed, server.endpoint.model)

    def _record(self, slot: Slot, body: dict[str, object], reply: Reply) -> Record:
        task = self._tasks[slot.task]
        passed, number, error = None, None, reply.error
        calls: int | None = None
        if error is None:
            if task.tools is not None:
                calls = len(parsed_calls(reply.text, reply.calls, task.tools))
            response = Response(reply.text, reply.calls, reply.finish_reason)
            verdict = score(self._scorers[task.id], response, task.scorer.threshold)
            passed, number, error = verdict.passed, verdict.score, verdict.error
        sampling = self._settings.sampling
        return Record(
            phase=self.phase,
            block=slot.block,
            position=slot.position,
            arm=slot.arm,
            task=slot.task,
            repeat=slot.repeat,
            seed=seed_of(sampling.seed, slot, self.phase, sampling.temperature),
            started=reply.started,
            ttft=reply.ttft,
            latency=reply.latency,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            cached_tokens=reply.cached_tokens,
            finish_reason=reply.finish_reason,
            text=reply.text,
            calls=reply.calls,
            tool_calls=calls,
            passed=passed,
            score=number,
            error=error,
            attempts=reply.attempts,
            request_sha256=request_digest(body),
            response_sha256=digest([reply.text, reply.calls, reply.finish_reason]),
        )


def _warmup_task() -> Task:
    return Task.model_validate({"id": "warm-up", "prompt": _WARMUP, "scorer": {"type": "regex", "pattern": "."}})
