"""``rollout.backend = "vllm"``: a whole run against the scripted server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import count_ones
import pytest
import torch
from fake_vllm import FakeVllm
from small_run import small_config

from halfbyte.config import Config
from halfbyte.errors import ConfigError, SpecMismatchError
from halfbyte.models.open_model import open_model
from halfbyte.models.safetensors_io import SafetensorsFile
from halfbyte.rollout.vllm.errors import WrongWeightsError
from halfbyte.train import run
from halfbyte.train.run_folder import RunFolder

SETS = {
    "precision": "bf16",
    "alignment__method": "none",
    "env__name": "arithmetic:sort",
    "rollout__backend": "vllm",
    "learner__schedule": "constant",
    "train__steps": 2,
    "train__threads": 1,
}


@pytest.fixture
def tiny() -> Iterator[FakeVllm]:
    it = FakeVllm({name: t.bfloat16() for name, t in open_model("tiny")[0].tensors.items()})
    yield it
    it.close()


def config(out: Path, url: str, reward: str | None = None, **sets: Any) -> Config:
    return small_config(Path("tiny"), out, reward, **(SETS | {"rollout__url": url, "eval__prompts": 2} | sets))


@pytest.fixture
def reward(monkeypatch: pytest.MonkeyPatch) -> str:
    """Functions are called in processes of their own, which have to find the module."""
    monkeypatch.setenv("PYTHONPATH", str(Path(count_ones.__file__).parent), prepend=":")
    return "count_ones:ones"


def test_a_run_trains_the_server_with_it_and_goes_on(tiny: FakeVllm, tmp_path: Path, reward: str) -> None:
    assert run(config(tmp_path / "run", tiny.url, reward)) == 0
    same_as_saved(tiny, tmp_path / "run")
    rows = [r for r in RunFolder(tmp_path / "run").rows() if r["kind"] == "train"]
    assert [r["version"] for r in rows] == [1.0, 2.0]
    assert all(r["tokens/rollout"] > 0 for r in rows)
    assert tiny.label == "2"
    again = config(tmp_path / "run", tiny.url, reward, train__steps=3, rollout__verify_every=2)
    assert run(again, resume=True) == 0, "the server's address and the checks change no number"
    same_as_saved(tiny, tmp_path / "run")
    assert tiny.label == "3"


def same_as_saved(fake: FakeVllm, out: Path) -> None:
    saved = dict(SafetensorsFile(out / "model" / "model.safetensors"))
    assert saved.keys() == fake.served.keys()
    assert all(torch.equal(saved[name], fake.served[name]) for name in saved)


def test_wrong_weights_end_the_run(tiny: FakeVllm, tmp_path: Path, reward: str) -> None:
    tiny.stale = {"model.layers.1.mlp.experts.3.down_proj.weight"}
    with pytest.raises(WrongWeightsError, match=r"experts\.3\.down_proj"):
        run(config(tmp_path / "run", tiny.url, reward))
    assert tiny.paused


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ({"rollout__url": None}, "needs url"),
        ({"rollout__python": "python3"}, "needs url"),
        ({"rollout__overlap": True}, "when it is submitted"),
        ({"rollout__backend": "local"}, 'need backend = "vllm"'),
    ],
)
def test_keys_that_do_not_go_together(tmp_path: Path, sets: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(tmp_path / "run", "http://127.0.0.1:9", **sets)


def test_a_precision_that_the_server_does_not_run_is_refused(tiny: FakeVllm, tmp_path: Path) -> None:
    with pytest.raises(SpecMismatchError, match="runs bfloat16"):
        run(config(tmp_path / "run", tiny.url, precision="w4a4kv4"))
