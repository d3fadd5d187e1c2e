"""Episodes: turns continue token ids, observations are masked, log-probs stay those of the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from halfbyte.envs import Prompt, Turn
from halfbyte.errors import DataError
from halfbyte.models.checkpoint import load_checkpoint
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import SamplingParams
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.train.collect import collect, encode_prompt


class Characters:
    """Token id = code point - 48; like a character-level tokenizer."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self.encoded.append(text)
        return [ord(c) - 48 for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i + 48) for i in ids)


class Conversation:
    """Ends after as many turns as the sample index allows; replies with a text of its own."""

    name, multi_turn = "conversation", True

    def __init__(self) -> None:
        self.heard: list[tuple[str, tuple[int, ...]]] = []
        self.started = 0

    def start(self, prompt: Prompt) -> Conversation._Episode:
        self.started += 1
        return self._Episode(self, turns=self.started % 3 + 1)

    class _Episode:
        def __init__(self, env: Conversation, turns: int) -> None:
            self.env, self.left = env, turns

        def step(self, text: str, ids: Sequence[int]) -> Turn:
            self.env.heard.append((text, tuple(ids)))
            self.left -= 1
            return Turn(
                done=self.left == 0,
                reward=1.0,
                observation=None if self.left == 0 else "=7=",
                info={"correct": self.left == 0},
            )


@pytest.fixture
def engine(family_folders: dict[str, Path]) -> Engine:
    held = load_checkpoint(family_folders["qwen3_moe"])
    precision = precision_from({"preset": "w4a4kv4", "prefill": {"experts": "bf16"}})
    return Engine(
        held.architecture, precision, held.tensors, detokeniser=Characters(), options=EngineOptions(kv_memory_mb=2)
    )


def test_ms_swift_10012_turns_continue_ids_and_nothing_is_encoded_twice(engine: Engine) -> None:
    env, tokenizer = Conversation(), Characters()
    prompts = [Prompt(id="a", text="123"), Prompt(id="b", text="4567")]
    # stop at a token that appears now and then, so that turns have different lengths
    sampling = SamplingParams(max_tokens=6, stop_ids=tuple(range(20)), ignore_eos=True)
    got = collect(engine, env, tokenizer, prompts, sampling, samples=3, key=("t",))  # type: ignore[arg-type]
    assert [(t.group, t.sample) for t in got] == [(g, s) for g in range(2) for s in range(3)]
    assert {len(t.turns) for t in got} > {1}
    assert sorted(tokenizer.encoded) == sorted(["123", "4567"] + ["=7="] * sum(len(t.turns) - 1 for t in got))
    observation = [ord(c) - 48 for c in "=7="]
    for t in got:
        t.check(64)
        for begin in t.turns[1:]:
            assert t.response_ids[begin - 3 : begin].tolist() == observation
            assert not t.mask[begin - 3 : begin].any()
        assert int((~t.mask).sum()) == 3 * (len(t.turns) - 1)
        assert t.reward == len(t.turns) or t.finish_reason == "length"
        assert t.routes is not None
        assert (t.routes >= 0).all()
        assert len(t.routes) == len(t) - 1


def test_logprobs_of_later_turns_are_those_of_the_whole_sequence(engine: Engine) -> None:
    """Also where prompt and generated tokens run in different precisions: a generated token stays one."""
    sampling = SamplingParams(max_tokens=6, stop_ids=tuple(range(20)), ignore_eos=True)
    got = collect(engine, Conversation(), Characters(), [Prompt(id="a", text="123")], sampling, samples=3, key=("t",))  # type: ignore[arg-type]
    assert max(len(t.turns) for t in got) > 1
    for t in got:
        generated = [False] * len(t.prompt_ids) + t.mask.tolist()
        again = engine.score(t.prompt_ids.tolist(), t.response_ids.tolist(), generated=generated)
        assert np.array_equal(again[t.mask], t.logprobs[t.mask])


def test_an_episode_that_fills_the_context_ends_with_what_it_has(family_folders: dict[str, Path]) -> None:
    class Endless(Conversation):
        def start(self, prompt: Prompt) -> Conversation._Episode:
            return self._Episode(self, turns=10**6)

    held = load_checkpoint(family_folders["qwen3_moe"])
    options = EngineOptions(kv_memory_mb=2, max_length=40)
    engine = Engine(
        held.architecture, precision_from("w4a4kv4"), held.tensors, detokeniser=Characters(), options=options
    )
    sampling = SamplingParams(max_tokens=6, stop_ids=tuple(range(40)), ignore_eos=True)
    got = collect(engine, Endless(), Characters(), [Prompt(id="a", text="123")], sampling, samples=4, key=("t",))  # type: ignore[arg-type]
    for t in got:
        assert t.finish_reason == "length"
        assert len(t) <= 40
        assert t.reward is not None
        assert t.info["correct"] is False
    assert max(len(t) for t in got) > 30, "some episode went on until the context was full"


def test_prompts_that_do_not_fit_are_named() -> None:
    with pytest.raises(DataError, match="prompt of 5 tokens"):
        encode_prompt(Characters(), Prompt(id="x", text="12345"), 4)  # type: ignore[arg-type]
