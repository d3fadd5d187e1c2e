"""Tasks of many turns in the training loop: the packaged policy plays them, and learns one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from halfbyte.config import load_config
from halfbyte.envs import make_env
from halfbyte.models.open_model import open_model
from halfbyte.models.precision import precision_from
from halfbyte.models.trajectory import SamplingParams
from halfbyte.rollout.engine import Engine
from halfbyte.train import run
from halfbyte.train.collect import collect

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "guess.toml"


def test_what_the_environment_says_is_masked_and_nothing_else() -> None:
    checkpoint, tokenizer = open_model("tiny")
    engine = Engine(checkpoint.architecture, precision_from("bf16"), dict(checkpoint.tensors), detokeniser=tokenizer)
    environment = make_env("agent:guess", largest=9, max_width=8, turns=16)
    prompts = [environment.prompt("train", i) for i in range(4)]
    # one character a turn: "length" would end the episode, so a digit is made an end of turn
    digits = tuple(tokenizer.encode("0123456789"))
    sampling = SamplingParams(max_tokens=8, stop_ids=digits)
    trajectories = collect(engine, environment, tokenizer, prompts, sampling, samples=4, key=("test",))
    assert max(len(t.turns) for t in trajectories) == 16
    for t in trajectories:
        episode, expected = environment.start(prompts[t.group]), list[bool]()
        borders = [*t.turns, len(t.response_ids)]
        start = 0
        for border in borders[1:]:
            own = [i for i in range(start, border) if t.mask[i]]
            turn = episode.step(tokenizer.decode(t.response_ids[own].tolist()), [])
            said = [] if turn.done else tokenizer.encode(turn.observation or "")
            expected += [True] * len(own) + [False] * len(said)
            assert t.response_ids[border - len(said) : border].tolist() == said or border == len(t.response_ids)
            start = border
        assert t.mask.tolist() == expected[: len(t.mask)]
        assert (t.logprobs[~t.mask] == 0).all()
        assert np.isfinite(t.logprobs).all()


@pytest.mark.slow
def test_the_packaged_policy_learns_to_guess(tmp_path: Path) -> None:
    config = load_config(EXAMPLE, [], {"train.out": tmp_path / "run"})
    assert run(config) == 0
    got = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert got["accuracy_before"] < 0.10
    assert got["accuracy_after"] > 0.40  # .74 and .55 with seeds 0 and 1
