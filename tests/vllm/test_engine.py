"""The engine against a scripted server: ids, log-probs, versions; updates through a real store, verified and refused."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from fake_vllm import FakeVllm, language_model, log_softmax

from halfbyte.errors import ConfigError, DataError, RefitError, SpecMismatchError
from halfbyte.models.architecture import Architecture
from halfbyte.models.precision import PRESETS
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.refit.patch import Stamp
from halfbyte.rollout.request import Request
from halfbyte.rollout.vllm.client import VllmClient
from halfbyte.rollout.vllm.engine import VllmEngine
from halfbyte.rollout.vllm.errors import VllmError, WrongWeightsError

GENERATE = "/inference/v1/generate"


def engine(fake: FakeVllm, arch: Architecture, **options: Any) -> VllmEngine:
    return VllmEngine(VllmClient(fake.url, sleep=lambda seconds: None), arch, **options)


def recomputed(weights: dict[str, torch.Tensor], t: Trajectory) -> list[float]:
    """Log-probs of a response by the fake's language model, from the ids alone."""
    model, ids, out = language_model(weights), t.prompt_ids.tolist(), []
    for token in t.response_ids.tolist():
        values = model(ids)
        if t.sampling.temperature:
            values = values / t.sampling.temperature
        if t.sampling.top_k:
            values = np.where(values >= np.sort(values)[-t.sampling.top_k], values, -np.inf)
        out.append(float(log_softmax(values)[token]))
        ids.append(token)
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_trajectories_are_what_the_model_drew(
    fake: FakeVllm, arch: Architecture, training: Any, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True)
    requests = [Request((4, 5), sampling, n=3, group=7), Request((9,), sampling, n=1, group=8, first_sample=2)]
    got = engine(fake, arch).generate(requests)
    assert [(t.group, t.sample) for t in got] == [(7, 0), (7, 1), (7, 2), (8, 2)]
    for t in got:
        assert t.logprobs == pytest.approx(recomputed(training.weights, t), abs=1e-5)
        assert t.precision == PRESETS["bf16"]
        assert (t.finish_reason, len(t.response_ids), t.mask.all()) == ("length", 6, True)
        t.check(arch.vocab_size)


def test_samples_are_drawn_apart_and_again_the_same(fake: FakeVllm, arch: Architecture) -> None:
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    it = engine(fake, arch)
    whole = it.generate([Request((4, 5), sampling, n=4, key=11)])
    tokens = [t.response_ids.tolist() for t in whole]
    assert len({tuple(row) for row in tokens}) == 4
    split = it.generate([Request((4, 5), sampling, n=2, key=11, first_sample=s) for s in (0, 2)])
    assert [t.response_ids.tolist() for t in split] == tokens, "a group can be split"
    assert it.generate([Request((4, 5), sampling, key=12)])[0].response_ids.tolist() not in tokens
    assert it.tokens_generated == 12 * 9


def test_an_eos_id_ends_a_response_and_stays_in_it(fake: FakeVllm, arch: Architecture, training: Any) -> None:
    fake.twist = -40.0 / 31  # low ids, EOS among them, are likely
    got = engine(fake, arch, verify_every=0).generate([Request((4,), SamplingParams(max_tokens=50), n=8)])
    ended = [t for t in got if t.finish_reason == "eos"]
    assert ended
    assert all(t.response_ids[-1] == 1 and 1 not in t.response_ids[:-1] for t in ended)
    got = engine(fake, arch).generate([Request((4,), SamplingParams(max_tokens=50, stop_ids=(0,)), n=8)])
    assert {"stop"} <= {t.finish_reason for t in got}


def test_kept_ids_travel_where_the_server_gives_them(fake: FakeVllm, arch: Architecture, training: Any) -> None:
    request = Request((4, 5), SamplingParams(top_k=3, max_tokens=5, ignore_eos=True))
    with pytest.raises(VllmError, match="top-k"):
        engine(fake, arch).generate([request])
    fake.masks = True
    (t,) = engine(fake, arch).generate([request])
    assert t.supports is not None
    assert [len(s) for s in t.supports if s is not None] == [3] * 5
    assert all(i in s for i, s in zip(t.response_ids, t.supports) if s is not None)
    assert t.logprobs == pytest.approx(recomputed(training.weights, t), abs=1e-5)


def test_requests_that_would_harm_the_server_never_reach_it(fake: FakeVllm, arch: Architecture) -> None:
    it = engine(fake, arch)
    before = fake.calls[GENERATE]
    for ids, said in [((), "empty"), ((4, 32), "vocabulary"), ((-1,), "vocabulary"), ((4,) * 64, "fewer than 64")]:
        with pytest.raises(DataError, match=said):
            it.generate([Request((4,)), Request(ids)])
    assert fake.calls[GENERATE] == before
    it.generate([Request((4,) * 60, SamplingParams(max_tokens=50))])
    assert fake.bodies[GENERATE]["sampling_params"]["max_tokens"] == 4, "no more than fits"


def test_log_probs_of_another_distribution_are_found_out(fake: FakeVllm, arch: Architecture) -> None:
    fake.raw = True
    with pytest.raises(VllmError, match="--logprobs-mode processed_logprobs"):
        engine(fake, arch)


def test_the_precision_is_what_the_server_runs(fake: FakeVllm, arch: Architecture) -> None:
    with pytest.raises(SpecMismatchError, match="runs bfloat16"):
        engine(fake, arch, precision=PRESETS["w4a4kv4"])
    fake.dtype = "float32"
    with pytest.raises(SpecMismatchError, match="runs float32"):
        engine(fake, arch)
    assert engine(fake, arch, precision=PRESETS["fp32"]).precision.name == "fp32"


def test_a_cpu_server_that_would_die_of_a_seed_is_refused(fake: FakeVllm, arch: Architecture) -> None:
    fake.chunked = True
    with pytest.raises(VllmError, match="--no-enable-chunked-prefill"):
        engine(fake, arch)


def test_another_protocol_is_refused(fake: FakeVllm, arch: Architecture) -> None:
    fake.protocol = 2
    with pytest.raises(VllmError, match="speaks protocol 2"):
        engine(fake, arch)


def test_a_plain_server_generates_and_takes_no_weights(fake: FakeVllm, arch: Architecture, training: Any) -> None:
    fake.extension = False
    it = engine(fake, arch)
    assert len(it.generate([Request((4,), n=2)])) == 2
    with pytest.raises(ConfigError, match="worker-extension-cls"):
        it.connect(str(training.store), training.stamp)
    fake.extension, fake.backend = True, "nccl"
    with pytest.raises(ConfigError, match="weight-transfer-config"):
        engine(fake, arch).connect(str(training.store), training.stamp)


def test_updates_arrive_and_are_verified(fake: FakeVllm, arch: Architecture, training: Any) -> None:
    it = engine(fake, arch, verify_every=2)
    checked = [it.connect(str(training.store), training.stamp).verification is not None]
    for names in ((), ("model.layers.1.mlp.gate.weight",), ("lm_head.weight",)):
        checked.append(it.update(training.publish(*names)).verification is not None)
        (t,) = it.generate([Request((4, 5), SamplingParams(max_tokens=5, ignore_eos=True))])
        assert set(t.versions.tolist()) == {training.stamp.version} == {it.version}
        assert t.logprobs == pytest.approx(recomputed(training.weights, t), abs=1e-5)
    assert checked == [True, True, False, True], "the first, and every second"
    assert not fake.paused


def test_weights_come_over_http(fake: FakeVllm, arch: Architecture, training: Any, over_http: str) -> None:
    it = engine(fake, arch)
    it.connect(f"{over_http}/store", training.stamp)
    it.update(training.publish())
    assert all(torch.equal(fake.served[name], t) for name, t in training.weights.items())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"stale": {"model.layers.0.mlp.gate.weight"}}, r"1 weights differ: model\.layers\.0\.mlp\.gate\.weight"),
        ({"twist": 1e-3}, "sampled log-probs differ by up to"),
    ],
)
def test_a_server_with_wrong_weights_serves_no_more(
    fake: FakeVllm, arch: Architecture, training: Any, fault: dict[str, Any], said: str
) -> None:
    it = engine(fake, arch)
    it.connect(str(training.store), training.stamp)
    vars(fake).update(fault)
    with pytest.raises(WrongWeightsError, match=said):
        it.update(training.publish())
    assert fake.paused, "nobody else is served either"
    assert not it.healthy
    for again in (lambda: it.generate([Request((4,))]), lambda: it.update(training.stamp)):
        with pytest.raises(WrongWeightsError, match="serves no more"):
            again()


def test_weights_damaged_on_the_host_are_found(fake: FakeVllm, arch: Architecture, training: Any) -> None:
    it = engine(fake, arch)
    it.connect(str(training.store), training.stamp)
    stamp = training.publish("lm_head.weight")
    fake.script["/finish_weight_update"] = [lambda handler: damage(fake, handler)]
    with pytest.raises(WrongWeightsError, match="host tensors"):
        it.update(stamp)


def damage(fake: FakeVllm, handler: Any) -> None:
    fake.host["model.embed_tokens.weight"][3, 3] += 1
    fake.served["model.embed_tokens.weight"][3, 3] += 1  # so that served and host agree
    fake.label = handler.headers.get("x", "2")
    handler.answer(200, {})


def test_a_failed_load_leaves_the_old_version(fake: FakeVllm, arch: Architecture, training: Any) -> None:
    it = engine(fake, arch)
    it.connect(str(training.store), training.stamp)
    old = {name: t.clone() for name, t in training.weights.items()}
    fake.break_loads = 1
    with pytest.raises(RefitError, match="serves the version it had") as caught:
        it.update(training.publish())
    assert not isinstance(caught.value, WrongWeightsError)
    assert (it.version, it.healthy, fake.paused) == (1, True, False)
    (t,) = it.generate([Request((4, 5), SamplingParams(max_tokens=5, ignore_eos=True))])
    assert t.logprobs == pytest.approx(recomputed(old, t), abs=1e-5)
    it.update(training.stamp)
    assert it.version == 2


def test_a_load_that_cannot_be_taken_back_stops_the_engine(fake: FakeVllm, arch: Architecture, training: Any) -> None:
    it = engine(fake, arch)
    it.connect(str(training.store), training.stamp)
    fake.break_loads = 2
    stamp = training.publish()
    with pytest.raises(RefitError):
        it.update(stamp)
    with pytest.raises(RefitError):
        it.generate([Request((4,))])


def test_only_the_version_asked_for_is_taken(fake: FakeVllm, arch: Architecture, training: Any) -> None:
    it = engine(fake, arch)
    it.connect(str(training.store), training.stamp)
    asked = training.publish()
    training.publish()
    with pytest.raises(RefitError, match="HEAD is version 3"):
        it.update(asked)
    with pytest.raises(RefitError, match="HEAD is version 3"):
        it.update(Stamp(asked.run, 3, "0" * 64))
    assert it.version == 1
    it.update(training.stamp)
    assert it.version == 3


@pytest.mark.parametrize("path", ["/finish_weight_update", "/collective_rpc", "/resume"])
def test_an_update_that_breaks_off_half_way_stops_the_engine(
    fake: FakeVllm, arch: Architecture, training: Any, path: str
) -> None:
    it = engine(fake, arch)
    it.connect(str(training.store), training.stamp)
    stamp = training.publish()
    fake.script[path] = [200, 500] if path == "/collective_rpc" else [500]
    if path == "/collective_rpc":
        fake.script[path] = []
        fake.script["/update_weights"] = [lambda handler: cut(fake, handler)]
    with pytest.raises((WrongWeightsError, VllmError)):
        it.update(stamp)
    assert not it.healthy
    with pytest.raises(WrongWeightsError):
        it.generate([Request((4,))])


def test_a_server_that_a_killed_trainer_left_in_mid_update_is_taken_over(
    fake: FakeVllm, arch: Architecture, training: Any
) -> None:
    it = engine(fake, arch)
    it.connect(str(training.store), training.stamp)
    for call in (lambda: it.client.pause("abort"), it.client.start_update):
        call()
    stamp = training.publish()
    it.client.update({"version": stamp.version, "state": stamp.state})
    other = engine(fake, arch)
    assert other.connect(str(training.store), stamp).verification is not None
    assert (other.version, fake.paused) == (2, False)
    assert all(torch.equal(fake.served[name], t) for name, t in training.weights.items())


def cut(fake: FakeVllm, handler: Any) -> None:
    """The update happens, its answer is lost, and so is the worker."""
    fake.on_update_weights(fake.bodies["/update_weights"], {})
    fake.script["/collective_rpc"] = [500, 500, 500]
    handler.connection.close()


def test_new_weights_reach_samples_in_flight(fake: FakeVllm, arch: Architecture, training: Any) -> None:
    it = engine(fake, arch)
    it.connect(str(training.store), training.stamp)
    old = {name: t.clone() for name, t in training.weights.items()}
    fake.hold = 3
    out: list[Trajectory] = []
    requests = [Request((4, 5), SamplingParams(max_tokens=7, ignore_eos=True), n=2, key=i, group=i) for i in range(3)]
    thread = threading.Thread(target=lambda: out.extend(it.generate(requests)))
    thread.start()
    with it._gate:
        assert it._gate.wait_for(lambda: it.requests_in_flight == 3, 30)
    hold(fake, it, training.publish())
    thread.join(60)
    assert [(t.group, t.sample) for t in out] == [(i // 2, i % 2) for i in range(6)]
    for t in out:
        first = int((t.versions == 1).sum())
        assert t.versions.tolist() == [1] * first + [2] * (7 - first)
        assert first <= 3, "the server held them there"
        assert t.finish_reason == "length"
        both = recomputed(old, t)[:first] + recomputed(training.weights, t)[first:]
        assert t.logprobs == pytest.approx(both, abs=1e-5), "every token by the weights that drew it"


def hold(fake: FakeVllm, it: VllmEngine, stamp: Stamp) -> None:
    """Update, and let samples run to their end afterwards."""
    resume = fake.on_resume

    def resumed(body: Any, query: Any) -> Any:
        fake.hold = 0
        return resume(body, query)

    fake.on_resume = resumed  # type: ignore[method-assign]
    it.update(stamp)


def test_a_request_that_others_abort_again_and_again_is_an_error(fake: FakeVllm, arch: Architecture) -> None:
    it = engine(fake, arch)

    def aborted(handler: Any) -> None:
        empty = {"index": 0, "token_ids": [], "finish_reason": "abort", "logprobs": None}
        handler.answer(200, {"choices": [empty]})

    fake.script[GENERATE] = [aborted] * 2
    (t,) = it.generate([Request((4,), SamplingParams(max_tokens=3, ignore_eos=True))])
    assert len(t.response_ids) == 3
    fake.script[GENERATE] = [aborted] * 10
    with pytest.raises(VllmError, match="aborted again and again"):
        it.generate([Request((4,))])
