"""The engine's thread by itself: pauses, cancellations, and errors of one sample among many."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serve_case import PATIENCE, Gate, Offline, wait_until

from halfbyte.errors import NumericsError
from halfbyte.models.trajectory import SamplingParams
from halfbyte.rollout.request import Request
from halfbyte.serve.job import Job
from halfbyte.serve.loop import Delivery, EngineLoop, Stopped
from halfbyte.serve.opening import Opened, open_served
from halfbyte.serve.prompts import prompt_key
from halfbyte.serve.settings import ServeSettings


class Harness:
    """A loop, and everything it delivers."""

    def __init__(self, opened: Opened, **options: Any) -> None:
        self.opened = opened
        self.loop = EngineLoop(opened.engine, self.deliver, **options)
        self.news: dict[int, list[Any]] = {}
        self.jobs = 0

    def deliver(self, news: Delivery) -> None:
        for job, piece in news:
            self.news.setdefault(job.group, []).append(piece)

    def job(self, prompt: str, *, n: int = 1, stream: bool = False, **sampling: Any) -> Job:
        ids = tuple(self.opened.tokenizer.encode(prompt))
        request = Request(ids, SamplingParams(**sampling), n=n, key=prompt_key(ids), group=self.jobs)
        self.jobs += 1
        return Job(request.group, [request], stream=stream)

    def tokens(self, job: Job, choice: int = 0) -> list[int]:
        pieces = [piece for piece in self.news.get(job.group, []) if not isinstance(piece, Exception)]
        return [token for piece in pieces if piece.choice == choice for token in piece.tokens]

    def ended(self, job: Job) -> bool:
        news = self.news.get(job.group, [])
        failed = any(isinstance(piece, Exception) for piece in news)
        return failed or sum(getattr(piece, "finish", None) is not None for piece in news) == job.choices

    def failure(self, job: Job) -> Exception | None:
        return next((piece for piece in self.news.get(job.group, []) if isinstance(piece, Exception)), None)

    def wait(self, *jobs: Job) -> None:
        wait_until(lambda: all(self.ended(job) for job in jobs), "jobs to end")


@pytest.fixture
def opened(folder: Path) -> Opened:
    return open_served(ServeSettings(str(folder), kv_memory_mb=4, max_sequences=64))


@pytest.fixture
def harness(opened: Opened) -> Iterator[Harness]:
    made = Harness(opened)
    yield made
    made.loop.stop()


def free(opened: Opened) -> bool:
    return opened.engine.pool.available == opened.engine.pool.n_pages and not opened.engine.busy


def test_a_cancelled_job_stops_and_frees_its_pages(opened: Opened, harness: Harness, offline: Offline) -> None:
    gate = Gate(opened)
    harness.loop.start()
    given_up = harness.job("1+2=", n=3, stream=True, max_tokens=200, ignore_eos=True)
    kept = harness.job("3+4=", max_tokens=20, seed=1, ignore_eos=True)
    for job in (given_up, kept):
        harness.loop.submit(job)
    gate.let(3)
    wait_until(lambda: len(harness.tokens(given_up)) >= 2, "tokens")
    assert harness.loop.snapshot.pages_used > 0
    harness.loop.cancel(given_up)
    gate.open()
    harness.wait(given_up, kept)
    assert isinstance(harness.failure(given_up), Stopped)
    assert len(harness.tokens(given_up)) < 10
    assert harness.tokens(kept) == offline("3+4=", max_tokens=20, seed=1, ignore_eos=True)[0].response_ids.tolist()
    wait_until(lambda: harness.loop.snapshot.pages_used == harness.loop.snapshot.running == 0, "pages to be freed")
    harness.loop.stop()
    assert free(opened)


def test_jobs_in_flight_fail_when_the_loop_stops(opened: Opened, harness: Harness) -> None:
    gate = Gate(opened)
    harness.loop.start()
    jobs = [harness.job("1+2=", max_tokens=200, ignore_eos=True) for _ in range(3)]
    for job in jobs:
        harness.loop.submit(job)
    gate.let(2)
    wait_until(lambda: bool(harness.news), "a token")
    stopper = threading.Thread(target=harness.loop.stop)
    stopper.start()
    gate.open()
    stopper.join(PATIENCE)
    assert all(isinstance(harness.failure(job), Stopped) for job in jobs)
    assert free(opened)


@pytest.mark.parametrize("policy", ["finish", "swap"])
def test_a_pause_lets_samples_finish_or_leaves_them_where_they_are(opened: Opened, policy: Any) -> None:
    harness = Harness(opened, on_refit=policy)
    gate = Gate(opened)
    harness.loop.start()
    early = harness.job("1+2=", stream=True, max_tokens=30, ignore_eos=True)
    harness.loop.submit(early)
    gate.let(5)
    wait_until(lambda: len(harness.tokens(early)) >= 3, "tokens")
    gate.open()
    with harness.loop.paused():
        at_rest = len(harness.tokens(early))
        late = harness.job("3+4=", max_tokens=5, ignore_eos=True)
        harness.loop.submit(late)
        steps = harness.loop.snapshot.steps
        if policy == "finish":
            assert at_rest == 30
            assert not opened.engine.busy
        assert late.group not in harness.news
    harness.wait(early, late)
    assert harness.loop.snapshot.steps > steps
    wait_until(lambda: harness.loop.snapshot.paused_seconds > 0, "the pause to be counted")
    harness.loop.stop()


def test_one_pause_may_follow_another_at_once(harness: Harness) -> None:
    harness.loop.start()
    for _ in range(300):
        with harness.loop.paused():
            pass
    job = harness.job("1=", max_tokens=2)
    harness.loop.submit(job)
    harness.wait(job)


def test_a_pause_ends_when_the_loop_does(opened: Opened, harness: Harness) -> None:
    gate = Gate(opened)
    harness.loop.start()
    harness.loop.submit(harness.job("1=", max_tokens=9, ignore_eos=True))
    assert gate.reached.wait(PATIENCE)  # or the pause would find the engine at rest
    caught: list[BaseException] = []

    def pause() -> None:
        try:
            harness.loop.pause()
        except Stopped as error:
            caught.append(error)

    waiting = threading.Thread(target=pause)
    waiting.start()
    stopper = threading.Thread(target=harness.loop.stop)
    stopper.start()
    waiting.join(PATIENCE)
    gate.open()
    stopper.join(PATIENCE)
    assert len(caught) == 1


class Poison:
    """Steps fail whenever a sample of a poisoned prompt would draw its token number ``at``; as a real layer would, late."""

    def __init__(self, opened: Opened, prompts: list[str], at: int) -> None:
        bad = {tuple(opened.tokenizer.encode(prompt)) for prompt in prompts}
        forward = opened.engine._forward
        self.failures = 0

        def poisoned(batch: Any, **options: Any) -> torch.Tensor:
            out = forward(batch, **options)
            for sample in opened.engine.scheduler.running.values():
                drawn = len(sample.tokens) - sample.prompt_length
                if sample.request.prompt_ids in bad and drawn >= at:
                    self.failures += 1
                    raise NumericsError("a logit is not finite", where="layer 1")
            return out

        opened.engine._forward = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("at", [0, 4])
def test_an_error_of_some_samples_is_not_everybodys(
    opened: Opened, harness: Harness, offline: Offline, at: int
) -> None:
    poison = Poison(opened, ["6*6=", "7*7="], at)
    jobs = {
        f"{a}+{b}=": harness.job(f"{a}+{b}=", n=2, stream=True, max_tokens=16, seed=a) for a in range(5) for b in (1, 2)
    }
    bad = [harness.job(prompt, n=2, max_tokens=16, ignore_eos=True) for prompt in ("6*6=", "7*7=")]
    for job in [*list(jobs.values())[:5], *bad, *list(jobs.values())[5:]]:
        harness.loop.submit(job)
    harness.loop.start()
    harness.wait(*jobs.values(), *bad)
    for job in bad:
        assert isinstance(harness.failure(job), NumericsError)
    for prompt, job in jobs.items():
        assert harness.failure(job) is None
        expected = offline(prompt, n=2, max_tokens=16, seed=int(prompt[0]))
        for choice, trajectory in enumerate(expected):
            assert harness.tokens(job, choice) == trajectory.response_ids.tolist(), "nothing lost, nothing twice"
    after = harness.job("1+1=", max_tokens=4)
    harness.loop.submit(after)
    harness.wait(after)
    assert harness.failure(after) is None
    assert poison.failures <= 2 * 4 * 8, "halving, not one by one"
    harness.loop.stop()
    assert free(opened)


def test_jobs_that_come_or_go_during_the_search_are_served_or_gone(
    opened: Opened, harness: Harness, offline: Offline
) -> None:
    gate = Gate(opened)
    Poison(opened, ["6*6="], 0)
    first = [harness.job(f"{i}+1=", stream=True, max_tokens=10, seed=i, ignore_eos=True) for i in range(6)]
    bad = harness.job("6*6=", max_tokens=10, ignore_eos=True)
    for job in (*first, bad):
        harness.loop.submit(job)
    harness.loop.start()
    gate.let(2)
    wait_until(lambda: harness.loop.snapshot.faults >= 1, "the fault")
    late = harness.job("9-1=", max_tokens=10, seed=3, ignore_eos=True)
    harness.loop.submit(late)
    harness.loop.cancel(first[0])
    harness.loop.cancel(first[5])
    gate.open()
    harness.wait(*first, bad, late)
    assert isinstance(harness.failure(first[0]), Stopped)
    assert isinstance(harness.failure(bad), NumericsError)
    for i in range(1, 5):
        expected = offline(f"{i}+1=", max_tokens=10, seed=i, ignore_eos=True)[0].response_ids.tolist()
        assert harness.tokens(first[i]) == expected
    assert harness.tokens(late) == offline("9-1=", max_tokens=10, seed=3, ignore_eos=True)[0].response_ids.tolist()


def test_what_fails_only_together_fails_and_the_server_goes_on(opened: Opened, harness: Harness) -> None:
    step = opened.engine.step

    def crowded() -> Any:
        if len(opened.engine._samples) > 2:
            opened.engine.withdraw(list(opened.engine._samples.values()))
            raise MemoryError("too many at once")
        return step()

    opened.engine.step = crowded  # type: ignore[method-assign]
    jobs = [harness.job(f"{i}+1=", max_tokens=5, ignore_eos=True) for i in range(4)]
    for job in jobs:
        harness.loop.submit(job)
    harness.loop.start()
    harness.wait(*jobs)
    assert all(harness.failure(job) is not None for job in jobs)
    after = harness.job("1+1=", max_tokens=4)
    harness.loop.submit(after)
    harness.wait(after)
    assert harness.failure(after) is None


def test_a_real_fault_of_one_request_leaves_the_others(folder: Path) -> None:
    """Not injected: one token's embedding is so large that the first residual sum overflows."""
    from halfbyte.models.open_model import open_model
    from halfbyte.models.precision import precision_from
    from halfbyte.rollout.engine import Engine, EngineOptions

    checkpoint, tokenizer = open_model(str(folder))
    tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    bad_token = tokenizer.encode("x")[0]
    tensors["model.embed_tokens.weight"][bad_token] = 3.3e38
    tensors["model.layers.0.self_attn.o_proj.weight"] *= 1e38
    engine, reference = (
        Engine(checkpoint.architecture, precision_from("bf16"), tensors, options=EngineOptions(kv_memory_mb=4))
        for _ in range(2)
    )
    with pytest.raises(NumericsError):
        engine.generate([Request((bad_token,), SamplingParams(max_tokens=2))])
    harness = Harness(Opened(engine, tokenizer, checkpoint))
    good = [harness.job(f"{i}+1=", max_tokens=6, temperature=0.0) for i in range(4)]
    bad = harness.job("1x2=", max_tokens=6)
    for job in (*good[:2], bad, *good[2:]):
        harness.loop.submit(job)
    harness.loop.start()
    harness.wait(*good, bad)
    harness.loop.stop()
    assert isinstance(harness.failure(bad), NumericsError)
    for job in good:
        assert harness.tokens(job) == reference.generate(job.requests)[0].response_ids.tolist()


def test_a_jobs_pieces_are_handed_over_once_and_end() -> None:
    async def story() -> None:
        from halfbyte.serve.job import Piece

        job = Job(0, [Request((1,), n=2)], stream=True)
        job.put(Piece(0, [5], [0.0], [0]))
        assert len(await job.pieces()) == 1
        waiting = asyncio.create_task(job.pieces())
        await asyncio.sleep(0)
        assert not waiting.done()
        job.put(Piece(0, [6], [0.0], [0], finish="eos"))
        assert [piece.tokens for piece in await waiting] == [[6]]
        job.put(Piece(1, [7], [0.0], [0], finish="length"))
        assert len(await job.pieces()) == 1
        assert await job.pieces() == []
        failed = Job(1, [Request((1,))], stream=True)
        failed.put(NumericsError("no"))
        with pytest.raises(NumericsError):
            await failed.pieces()
        assert failed.running == 0

    asyncio.run(story())
