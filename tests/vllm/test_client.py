"""HTTP: what is sent again, what never is, and what an error says."""

from __future__ import annotations

from typing import Any

import pytest
from fake_vllm import FakeVllm

from halfbyte.models.trajectory import SamplingParams
from halfbyte.rollout.vllm.answers import sampling_of
from halfbyte.rollout.vllm.client import VllmClient
from halfbyte.rollout.vllm.errors import VllmError

GENERATE = "/inference/v1/generate"
BODY = sampling_of(SamplingParams(max_tokens=2), (), n=1, seed=1)


def client(fake: FakeVllm, **options: Any) -> VllmClient:
    return VllmClient(fake.url, **({"sleep": lambda seconds: None} | options))


def test_a_generation_that_got_no_answer_is_sent_once_more(fake: FakeVllm) -> None:
    fake.script[GENERATE] = [503]
    assert len(client(fake).generate([4], BODY)["choices"]) == 1
    assert fake.calls[GENERATE] == 2
    fake.script[GENERATE] = [502, lambda handler: handler.connection.close()]
    with pytest.raises(VllmError, match=r"no answer.*the first try: HTTP 502"):
        client(fake).generate([4], BODY)
    assert fake.calls[GENERATE] == 4


def test_a_request_that_is_wrong_is_not_sent_again(fake: FakeVllm) -> None:
    fake.script[GENERATE] = [400]
    with pytest.raises(VllmError, match="HTTP 400: scripted 400"):
        client(fake).generate([4], BODY)
    assert fake.calls[GENERATE] == 1


@pytest.mark.parametrize(
    "path", ["/update_weights", "/start_weight_update", "/finish_weight_update", "/collective_rpc"]
)
def test_what_changes_weights_is_never_sent_again(fake: FakeVllm, path: str) -> None:
    fake.script[path] = [503, 503]
    it = client(fake)
    calls = {
        "/update_weights": lambda: it.update({}),
        "/start_weight_update": it.start_update,
        "/finish_weight_update": lambda: it.finish_update(1),
        "/collective_rpc": lambda: it.rpc("halfbyte_info"),
    }
    with pytest.raises(VllmError, match="HTTP 503"):
        calls[path]()
    assert fake.calls[path] == 1


def test_a_server_that_hangs_is_given_up(fake: FakeVllm) -> None:
    fake.hold = 1
    with pytest.raises(VllmError, match="timed out"):
        client(fake, timeout=0.2).generate([4], BODY)


def test_errors_say_what_to_do(fake: FakeVllm) -> None:
    def dead(handler: Any) -> None:
        handler.answer(500, {"error": {"message": "EngineCore encountered an issue."}})

    fake.script = {GENERATE: [dead, 404], "/pause": [404]}
    with pytest.raises(VllmError, match="start the server again"):
        client(fake).generate([4], BODY)
    with pytest.raises(VllmError, match="--enable-scale-out"):
        client(fake).generate([4], BODY)
    with pytest.raises(VllmError, match="VLLM_SERVER_DEV_MODE=1"):
        client(fake).pause("abort")


def test_answers_of_another_shape_are_refused(fake: FakeVllm) -> None:
    fake.script = {
        "/v1/models": [lambda h: h.answer(200, {"data": []})],
        GENERATE: [lambda h: h.answer(200, [1])],
        "/collective_rpc": [lambda h: h.answer(200, {"results": []})],
        "/reset_prefix_cache": [lambda h: h.answer(200, {"success": False})],
    }
    with pytest.raises(VllmError, match="longest sequence"):
        client(fake).max_length()
    with pytest.raises(VllmError, match="not a JSON object"):
        client(fake).generate([4], BODY)
    with pytest.raises(VllmError, match="no results"):
        client(fake).rpc("halfbyte_info")
    with pytest.raises(VllmError, match="in use"):
        client(fake).reset_prefix_cache()


def test_addresses_and_keys(fake: FakeVllm) -> None:
    for url in ("127.0.0.1:8000", "ftp://host", "http://"):
        with pytest.raises(VllmError, match="not an HTTP address"):
            VllmClient(url)
    client(fake, api_key="secret").version()
    assert fake.headers["Authorization"] == "Bearer secret"
    assert "secret" not in repr(client(fake, api_key="secret"))
    gone = VllmClient("http://127.0.0.1:9", sleep=lambda seconds: None)
    assert not gone.healthy()
    with pytest.raises(VllmError, match="is the server running"):
        gone.version()
