"""The server follows a refit store: what runs finishes on its version or changes at a token, and says so token by token."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_case import Tensors, step
from serve_case import PATIENCE, Gate, client, metric, wait_until

from halfbyte.kernels import active
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.open_model import open_model
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import SamplingParams
from halfbyte.refit.publisher import Publisher, PublishOptions
from halfbyte.refit.store import open_store
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.fp4_target import fp4_coordinates, fp4_infos
from halfbyte.rollout.request import Request
from halfbyte.serve.opening import open_served
from halfbyte.serve.prompts import prompt_key
from halfbyte.serve.server import Server, background
from halfbyte.serve.settings import ServeSettings

PROMPT = "1+2="
OPTIONS: dict[str, Any] = {
    "model": "tiny",
    "prompt": PROMPT,
    "seed": 3,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}


@pytest.fixture(scope="module")
def line(folder: Path) -> list[Tensors]:
    """Three versions; far enough apart that they draw different tokens."""
    first = {n: t.clone() for n, t in load_checkpoint(folder).tensors.items()}
    return [first, step(first, 1, 0.5), perturbed(first)]


def perturbed(tensors: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    return {
        n: (t.float() + 0.05 * torch.randn(t.shape, generator=generator)).to(t.dtype) if t.dim() > 1 else t
        for n, t in tensors.items()
    }


def publisher(store: Path) -> Publisher:
    return Publisher(open_store(str(store)), "run", options=PublishOptions(anchor_every=1))


@contextmanager
def following(folder: Path, store: Path, **changes: Any) -> Iterator[tuple[Server, Gate]]:
    settings = ServeSettings(
        str(folder),
        served_name="tiny",
        port=0,
        kv_memory_mb=4,
        stream_seconds=0,
        follow=str(store),
        follow_seconds=0.02,
        **changes,
    )
    opened = open_served(settings)
    gate = Gate(opened)
    with background(settings, opened) as server:
        try:
            yield server, gate
        finally:
            gate.open()


def tokens_of(folder: Path, tensors: Tensors, count: int, prompt: str = PROMPT) -> list[int]:
    """What a fresh engine on these weights draws."""
    checkpoint, tokenizer = open_model(str(folder))
    engine = Engine(checkpoint.architecture, precision_from("w4a4kv4"), tensors, options=EngineOptions(kv_memory_mb=4))
    ids = tuple(tokenizer.encode(prompt))
    sampling = SamplingParams(max_tokens=count, seed=3, ignore_eos=True)
    return engine.generate([Request(ids, sampling, key=prompt_key(ids))])[0].response_ids.tolist()


def test_every_version_is_served_to_the_bit(folder: Path, line: list[Tensors], tmp_path: Path) -> None:
    writer = publisher(tmp_path / "store")
    writer.publish(line[0], version=10)
    with following(folder, tmp_path / "store") as (server, gate):
        gate.open()
        for version, tensors in zip((10, 11, 12), line):
            if version > 10:
                writer.publish(tensors, version=version)
            wait_until(lambda version=version: metric(server, "halfbyte_weight_version") == version, f"v{version}")
            answer = client(server).completions.create(**OPTIONS, max_tokens=20)
            assert answer.choices[0].token_ids == tokens_of(folder, tensors, 20)  # type: ignore[attr-defined]
            assert answer.weight_version == version  # type: ignore[attr-defined]
            assert answer.system_fingerprint is not None
            assert answer.system_fingerprint.endswith(f"-v{version}")
        assert metric(server, 'halfbyte_refits_total{outcome="taken"}') == 3
        assert metric(server, "halfbyte_refit_failing") == 0
        shown = json.loads(urllib.request.urlopen(f"{server.url}/version", timeout=PATIENCE).read())
        assert shown["weight_version"] == 12
    assert len({tuple(tokens_of(folder, tensors, 20)) for tensors in line}) > 1, "versions can be told apart"


def test_codes_are_followed_as_codes(folder: Path, line: list[Tensors], tmp_path: Path) -> None:
    arch, precision = load_checkpoint(folder).architecture, precision_from("w4a4kv4")
    coordinates = [fp4_coordinates(arch, precision, tensors, active()) for tensors in line]
    infos = fp4_infos(coordinates[0])
    writer = publisher(tmp_path / "store")
    with following(folder, tmp_path / "store") as (server, gate):
        gate.open()
        for version, (codes, tensors) in enumerate(zip(coordinates, line), 1):
            writer.publish(codes, version=version, infos=infos)
            wait_until(lambda version=version: metric(server, "halfbyte_weight_version") == version, f"v{version}")
            answer = client(server).completions.create(**OPTIONS, max_tokens=20)
            assert answer.choices[0].token_ids == tokens_of(folder, tensors, 20)  # type: ignore[attr-defined]


def test_requests_in_flight_finish_on_the_version_they_started(
    folder: Path, line: list[Tensors], tmp_path: Path
) -> None:
    writer = publisher(tmp_path / "store")
    writer.publish(line[0], version=1)
    with following(folder, tmp_path / "store", on_refit="finish") as (server, gate):
        wait_until(lambda: metric(server, "halfbyte_weight_version") == 1, "the first version")
        answers: dict[str, Any] = {}

        def ask(name: str) -> None:
            answers[name] = client(server).completions.create(**OPTIONS, max_tokens=30)

        early = threading.Thread(target=ask, args=("early",))
        early.start()
        gate.let(4)
        wait_until(lambda: metric(server, "halfbyte_engine_tokens_total") >= 4, "tokens")
        writer.publish(line[2], version=2)
        wait_until(lambda: server.service.loop._pause, "the refit to ask for a pause")
        late = threading.Thread(target=ask, args=("late",))
        late.start()
        wait_until(lambda: metric(server, "halfbyte_active_requests") == 2, "the second request")
        gate.open()
        for thread in (early, late):
            thread.join(PATIENCE)
        runs = {name: answer.choices[0].weight_versions for name, answer in answers.items()}
        assert runs == {"early": [{"version": 1, "tokens": 30}], "late": [{"version": 2, "tokens": 30}]}
        assert answers["early"].choices[0].token_ids == tokens_of(folder, line[0], 30)
        assert answers["late"].choices[0].token_ids == tokens_of(folder, line[2], 30)


@pytest.mark.parametrize("stream", [False, True])
def test_or_they_change_at_a_token_and_every_token_says_who_drew_it(
    folder: Path, line: list[Tensors], tmp_path: Path, stream: bool
) -> None:
    writer = publisher(tmp_path / "store")
    writer.publish(line[0], version=1)
    with following(folder, tmp_path / "store", on_refit="swap") as (server, gate):
        wait_until(lambda: metric(server, "halfbyte_weight_version") == 1, "the first version")
        parts: list[Any] = []

        def ask() -> None:
            answer = client(server).completions.create(**OPTIONS, max_tokens=30, stream=stream, logprobs=0)
            parts.extend([chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]])

        asking = threading.Thread(target=ask)
        asking.start()
        gate.let(10)
        wait_until(lambda: server.service.opened.engine.tokens_generated == 10, "ten tokens")
        writer.publish(line[2], version=2)
        wait_until(lambda: server.service.loop._pause, "the refit to ask for a pause")
        gate.let(1)
        wait_until(lambda: metric(server, "halfbyte_weight_version") == 2, "the second version")
        gate.open()
        asking.join(PATIENCE)
        runs = [run for part in parts for run in part.weight_versions]
        stamped = [run["version"] for run in runs for _ in range(run["tokens"])]
        tokens = [token for part in parts for token in part.token_ids]
        logprobs = [value for part in parts for value in part.logprobs.token_logprobs]
        border = stamped.index(2)
        assert 10 <= border <= 12
        assert stamped == [1] * border + [2] * (30 - border)
        assert tokens[:border] == tokens_of(folder, line[0], border)
        checkpoint, tokenizer = open_model(str(folder))
        new = Engine(checkpoint.architecture, precision_from("w4a4kv4"), line[2], options=EngineOptions(kv_memory_mb=4))
        scored = new.score(tokenizer.encode(PROMPT), tokens)
        assert np.array_equal(np.float32(logprobs)[border:], scored[border:]), "drawn by the new weights alone"
        assert not np.array_equal(np.float32(logprobs)[:border], scored[:border])


def test_a_refit_that_fails_leaves_the_old_version_serving_and_shows(
    folder: Path, line: list[Tensors], tmp_path: Path
) -> None:
    writer = publisher(tmp_path / "store")
    writer.publish(line[0], version=1)
    with following(folder, tmp_path / "store") as (server, gate):
        gate.open()
        wait_until(lambda: metric(server, "halfbyte_weight_version") == 1, "the first version")
        engine = server.service.opened.engine
        swap = engine.swap
        broken = threading.Event()
        broken.set()

        def failing(weights: Any) -> None:
            swap(weights)
            if broken.is_set() and weights.version == 2:
                raise RuntimeError("the device is gone")

        engine.swap = failing  # type: ignore[method-assign]
        writer.publish(line[2], version=2)
        wait_until(lambda: metric(server, 'halfbyte_refits_total{outcome="failed"}') >= 2, "failures")
        assert metric(server, "halfbyte_refit_failing") == 1
        answer = client(server).completions.create(**OPTIONS, max_tokens=20)
        assert answer.weight_version == 1  # type: ignore[attr-defined]
        assert answer.choices[0].token_ids == tokens_of(folder, line[0], 20)  # type: ignore[attr-defined]
        broken.clear()
        wait_until(lambda: metric(server, "halfbyte_refit_failing") == 0, "the next attempt")
        answer = client(server).completions.create(**OPTIONS, max_tokens=20)
        assert answer.choices[0].token_ids == tokens_of(folder, line[2], 20)  # type: ignore[attr-defined]
        assert metric(server, "halfbyte_pause_seconds_total") > 0


def test_an_empty_store_is_waited_for_and_a_damaged_one_reported(
    folder: Path, line: list[Tensors], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with following(folder, store) as (server, gate):
        gate.open()
        assert client(server).completions.create(**OPTIONS, max_tokens=2).choices
        assert metric(server, 'halfbyte_refits_total{outcome="failed"}') == 0
        store.mkdir(exist_ok=True)
        (store / "HEAD").write_text("{}", encoding="utf-8")
        wait_until(lambda: metric(server, "halfbyte_refit_failing") == 1, "the report")
        assert client(server).completions.create(**OPTIONS, max_tokens=2).choices
        (store / "HEAD").unlink()
        publisher(store).publish(line[1], version=4)
        wait_until(lambda: metric(server, "halfbyte_weight_version") == 4, "the version")


def test_prefixes_of_an_old_version_are_never_found(folder: Path, line: list[Tensors], tmp_path: Path) -> None:
    """NeMo RL #4018, lmdeploy #4917."""
    prompt = "123+456=" * 12
    options = {**OPTIONS, "prompt": prompt}
    writer = publisher(tmp_path / "store")
    writer.publish(line[0], version=1)
    with following(folder, tmp_path / "store") as (server, gate):
        gate.open()
        wait_until(lambda: metric(server, "halfbyte_weight_version") == 1, "the first version")
        for version, tensors in ((1, line[0]), (2, line[2])):
            if version == 2:
                writer.publish(tensors, version=2)
                wait_until(lambda: metric(server, "halfbyte_weight_version") == 2, "the second version")
            cached = []
            for _ in range(2):
                answer = client(server).completions.create(**options, max_tokens=8)
                assert answer.choices[0].token_ids == tokens_of(folder, tensors, 8, prompt)  # type: ignore[attr-defined]
                cached.append(answer.usage.prompt_tokens_details.cached_tokens)  # type: ignore[union-attr]
            assert cached == [0, 80]


def test_bf16_versions_do_not_follow_from_a_quantised_checkpoint(
    folder: Path, line: list[Tensors], tmp_path: Path
) -> None:
    from halfbyte.quantize.export import quantize_model

    quantize_model(
        str(folder),
        tmp_path / "fp4",
        style="halfbyte",
        kind="w4a4",
        spec_name="halfbyte",
        calibration=None,
        tensor_parallel=1,
        overwrite=False,
    )
    publisher(tmp_path / "store").publish(line[0], version=1)
    with following(tmp_path / "fp4", tmp_path / "store") as (server, gate):
        gate.open()
        wait_until(lambda: metric(server, "halfbyte_refit_failing") == 1, "the report")
        answer = client(server).completions.create(**OPTIONS, max_tokens=12)
        assert answer.weight_version == 0  # type: ignore[attr-defined]
        assert answer.choices[0].token_ids == tokens_of(folder, line[0], 12)  # type: ignore[attr-defined]
