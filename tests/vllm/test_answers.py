"""What is asked of vLLM, and what of its answers is believed."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.models.trajectory import SamplingParams
from halfbyte.rollout.vllm.answers import Piece, piece_of, sampling_of, seed_of
from halfbyte.rollout.vllm.errors import VllmError


def choice(ids: list[int], **changes: Any) -> dict[str, Any]:
    rows = [{"token_id": i, "logprob": -0.25 * (n + 1)} for n, i in enumerate(ids)]
    return {
        "index": 0,
        "token_ids": ids,
        "finish_reason": "length",
        "stop_reason": None,
        "logprobs": {"content": rows},
        "weight_versions": [{"version": "7", "start": 0, "end": len(ids)}],
    } | changes


def piece(answer: Any, sampling: SamplingParams | None = None) -> Piece:
    return piece_of(
        answer, sampling=sampling or SamplingParams(), eos_ids=(1,), vocab_size=32, version=3, where="request"
    )


def test_all_that_a_server_could_have_defaults_for_is_given() -> None:
    sent = sampling_of(SamplingParams(temperature=0.5, stop_ids=(9, 1), max_tokens=4), (1, 2), n=3, seed=5)
    assert sent["stop_token_ids"] == [9, 1, 2]
    assert sent["ignore_eos"] is True, "the model's own EOS ids go as stop ids; the server's are ignored"
    assert (sent["temperature"], sent["top_k"], sent["top_p"], sent["min_p"]) == (0.5, 0, 1.0, 0.0)
    assert (sent["repetition_penalty"], sent["presence_penalty"], sent["frequency_penalty"]) == (1.0, 0.0, 0.0)
    assert (sent["n"], sent["seed"], sent["max_tokens"], sent["min_tokens"]) == (3, 5, 4, 0)
    assert sent["detokenize"] is False, "ids never become text"
    assert sampling_of(SamplingParams(ignore_eos=True), (1, 2), n=1, seed=0)["stop_token_ids"] == []
    assert sampling_of(SamplingParams(stop=("x",)), (1,), n=1, seed=0)["detokenize"] is True


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**64 - 1), st.integers(1, 1 << 20))
def test_seeds_differ_by_seed_key_and_position_and_fit_vllm(seed: int, key: int, position: int) -> None:
    here = seed_of(seed, key, position)
    assert 0 <= here < 2**62, "vLLM adds the sample's index and takes int64"
    assert (
        len(
            {here, seed_of(seed + 1, key, position), seed_of(seed, key + 1, position), seed_of(seed, key, position + 1)}
        )
        == 4
    )


def test_ids_log_probs_and_versions_are_read_as_they_are() -> None:
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}]
    got = piece(choice([4, 1, 31], weight_versions=spans))
    assert got.ids.tolist() == [4, 1, 31]
    assert got.logprobs.tolist() == [-0.25, -0.5, -0.75]
    assert got.versions.tolist() == [3, 5, 5], "what the server has no label for has the engine's version"
    assert piece(choice([4], weight_versions=None)).versions.tolist() == [3]
    assert len(piece(choice([], finish_reason="abort", weight_versions=None, logprobs=None)).ids) == 0


@pytest.mark.parametrize(
    ("reason", "stop", "finish"),
    [("stop", 1, "eos"), ("stop", None, "eos"), ("stop", 9, "stop"), ("stop", "x", "stop"), ("length", None, "length"),
     ("abort", None, "abort")],
)  # fmt: skip
def test_finish_reasons(reason: str, stop: object, finish: str) -> None:
    assert piece(choice([4], finish_reason=reason, stop_reason=stop)).finish == finish


def rows(*pairs: tuple[int, Any]) -> dict[str, Any]:
    return {"content": [{"token_id": i, "logprob": p} for i, p in pairs]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": "4 5"}, "no list of integers"),
        ({"token_ids": [4, "5"]}, "no list of integers"),
        ({"token_ids": [4, True]}, "no list of integers"),
        ({"token_ids": [4, 32]}, "from 4 to 32"),
        ({"token_ids": [4, -1]}, "from -1 to 4"),
        ({"logprobs": None}, "0 log-probs for 2 tokens"),
        ({"logprobs": rows((4, -1.0))}, "1 log-probs for 2 tokens"),
        ({"logprobs": rows((4, -1.0), (6, -1.0))}, "of other tokens"),
        ({"logprobs": rows((4, -1.0), (5, -9999.0))}, "log-prob -9999"),
        ({"logprobs": rows((4, -1.0), (5, None))}, "log-prob nan"),
        ({"logprobs": rows((4, 0.5), (5, -1.0))}, "log-prob 0.5"),
        ({"weight_versions": [{"version": "7", "start": 0, "end": 1}]}, "weight versions of 1 tokens"),
        ({"weight_versions": [{"version": "7", "start": 1, "end": 2}]}, "expected: spans"),
        ({"weight_versions": [{"version": "new", "start": 0, "end": 2}]}, "'new'"),
        ({"finish_reason": "error"}, "ended with 'error'"),
        ({"finish_reason": None}, "ended with None"),
        ({"routed_experts": "no base64"}, "routed experts"),
    ],
)
def test_answers_that_do_not_fit_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(VllmError, match=said):
        piece(choice([4, 5], **changes))


def test_filtered_sampling_needs_the_kept_ids() -> None:
    filtered = SamplingParams(top_k=3)
    with pytest.raises(VllmError, match="which tokens top-k"):
        piece(choice([4, 5]), filtered)
    got = piece(choice([4, 5], sampling_mask=[[9, 4], [5]]), filtered)
    assert got.supports is not None
    assert [row.tolist() for row in got.supports] == [[4, 9], [5]]
    with pytest.raises(VllmError, match="1 sampling masks for 2 tokens"):
        piece(choice([4, 5], sampling_mask=[[4]]), filtered)


def test_routes_are_read_without_pickle() -> None:
    routes = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    got = piece(choice([4, 5], routed_experts=encoded(routes)))
    assert got.routes is not None
    assert got.routes.tolist() == routes.tolist()
    with pytest.raises(VllmError, match="routed experts"):
        piece(choice([4, 5], routed_experts=encoded(np.array([{"a": 1}], dtype=object))))
    with pytest.raises(VllmError, match="routed experts"):
        piece(choice([4, 5], routed_experts=encoded(routes.astype(np.float32))))


def encoded(array: Any) -> str:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return base64.b64encode(out.getvalue()).decode()
