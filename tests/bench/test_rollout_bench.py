"""``halfbyte bench rollout``: decoders take turns, ratios follow from the speeds, tokens and bytes are checked."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from halfbyte.bench import rollout as bench
from halfbyte.bench.decoders import Decoded, EngineDecoder, TransformersDecoder
from halfbyte.bench.memory import resident
from halfbyte.bench.random_moe import RandomTensors, moe_architecture
from halfbyte.bench.rollout import Contest, RolloutRow, race
from halfbyte.cli.main import main
from halfbyte.errors import ConfigError
from halfbyte.kernels import active
from halfbyte.models import Architecture, parameter_count
from halfbyte.models.open_model import model_folder, open_model
from halfbyte.models.precision import PRESETS, Precision
from halfbyte.models.trajectory import SamplingParams
from halfbyte.planning.footprint import weight_bytes
from halfbyte.rollout.engine import Engine
from halfbyte.rollout.request import Request
from halfbyte.rollout.weights import RolloutWeights

COLUMNS = {"model", "precision", "batch", "tokens_per_second", "baseline", "ratio"}
SMALL = moe_architecture(
    vocab_size=64, hidden_size=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, n_experts=8, experts_per_token=2,
    moe_intermediate_size=32, max_positions=128,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _environment_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))


def predict(architecture: Architecture, precision: Precision) -> int:
    return sum(weight_bytes(architecture, precision)[0].values())


class Fake:
    """Decodes at a known speed; ``drift`` changes its tokens from call to call."""

    def __init__(self, name: str, speed: float, log: list[str], *, drift: bool = False) -> None:
        self.name, self.speed, self.log, self.drift, self.calls = name, speed, log, drift, 0

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decoded:
        self.log.append(self.name)
        self.calls += 1
        token = self.calls if self.drift else 0
        tokens = tuple((token,) * new_tokens for _ in prompts)
        return Decoded(tokens, len(prompts) * (new_tokens - 1) / (self.speed * len(prompts)))


def contest(log: list[str], *, drift: bool = False, other: bool = True) -> Contest:
    ours = {"bf16": Fake("bf16", 10.0, log), "w4a4kv4": Fake("w4a4kv4", 25.0, log, drift=drift)}
    return Contest("fake", 32, ours, Fake("transformers bf16", 5.0, log) if other else None, (), ())


def rows_of(found: Contest, batches: Sequence[int] = (1, 4), repeats: int = 4) -> list[RolloutRow]:
    return list(race(found, batches, prompt_tokens=3, new_tokens=6, repeats=repeats))


def test_decoders_take_turns_forwards_and_backwards() -> None:
    log: list[str] = []
    rows_of(contest(log), batches=(2,), repeats=3)
    order = ["bf16", "w4a4kv4", "transformers bf16"]
    assert log == order + order + order[::-1] + order


def test_ratios_are_those_of_the_speeds() -> None:
    rows = rows_of(contest([]))
    assert [(r.precision, r.batch, r.baseline) for r in rows] == [
        ("bf16", 1, "transformers bf16"),
        ("w4a4kv4", 1, "halfbyte bf16"),
        ("w4a4kv4", 1, "transformers bf16"),
        ("bf16", 4, "transformers bf16"),
        ("w4a4kv4", 4, "halfbyte bf16"),
        ("w4a4kv4", 4, "transformers bf16"),
    ]
    assert [row.ratio for row in rows] == pytest.approx([2.0, 2.5, 5.0] * 2)
    assert rows[-1].tokens_per_second == pytest.approx(4 * 25.0)
    for row in rows:
        found = row.to_json()
        assert found.keys() >= COLUMNS
        assert found["ratio"] == found["tokens_per_second"] / found["baseline_tokens_per_second"]
        assert json.dumps(found)


def test_without_transformers_our_bf16_is_the_only_baseline() -> None:
    assert {row.baseline for row in rows_of(contest([], other=False))} == {"halfbyte bf16"}


def test_tokens_that_change_from_round_to_round_are_reported() -> None:
    same = {row.precision: row.same_tokens for row in rows_of(contest([], drift=True))}
    assert same == {"bf16": True, "w4a4kv4": False}


def test_the_first_token_is_not_timed_so_two_are_needed() -> None:
    assert Decoded(((1, 2, 3), (4, 5, 6)), 2.0).tokens_per_second == 2.0
    with pytest.raises(ConfigError, match="--tokens"):
        list(race(contest([]), [1], prompt_tokens=3, new_tokens=1, repeats=1))


def test_our_decoder_draws_what_the_engine_generates() -> None:
    checkpoint, _ = open_model("tiny")
    prompts = [[3, 4, 5, 6], [7, 8, 9, 10], [3, 4, 5, 6]]
    precision = PRESETS["w4a4kv4"]
    decoder = EngineDecoder(checkpoint.architecture, precision, checkpoint.tensors, batch=3, length=24)
    engine = Engine(checkpoint.architecture, precision, checkpoint.tensors)
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = [t.response_ids.tolist() for t in engine.generate([Request(tuple(p), sampling) for p in prompts])]
    for _ in range(2):
        decoded = decoder.decode(prompts, 20)
        assert [list(tokens) for tokens in decoded.tokens] == expected
        assert decoded.seconds > 0
    assert all(len(tokens) == 20 for tokens in expected)


def test_transformers_decodes_as_many_tokens_greedily() -> None:
    transformers = pytest.importorskip("transformers")
    folder = model_folder("tiny")
    decoder = TransformersDecoder(folder)
    prompts = [[3, 4, 5, 6], [7, 8, 9, 10]]
    decoded = decoder.decode(prompts, 20)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        for _ in range(20):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert [len(tokens) for tokens in decoded.tokens] == [20, 20]
    # BF16 rounding differs between cached and whole passes; the beginnings must agree
    assert [list(tokens[:4]) for tokens in decoded.tokens] == ids[:, 4:8].tolist()


def test_random_tensors_are_a_whole_model_and_always_the_same() -> None:
    tensors = RandomTensors(SMALL)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert torch.equal(tensors[name], RandomTensors(SMALL)[name])
    assert not torch.equal(tensors[name], tensors["model.layers.1.mlp.experts.2.up_proj.weight"])
    assert sum(t.numel() for t in tensors.values()) == parameter_count(SMALL)
    full = moe_architecture()
    assert (full.n_experts, full.experts_per_token) == (64, 8)
    assert 0.9e9 < parameter_count(full) < 1.1e9


def test_a_random_moe_decodes_beside_its_bf16_twin() -> None:
    found = bench.open_random_moe(predict, batch=2, length=12, architecture=SMALL)
    rows = list(race(found, [1, 2], prompt_tokens=4, new_tokens=8, repeats=2))
    assert {row.precision for row in rows} == {"w4a4kv4", "w4a4kv4-head"}
    assert {row.baseline for row in rows} == {"halfbyte bf16"}
    assert all(row.same_tokens and row.tokens_per_second > 0 for row in rows)


@pytest.mark.parametrize("preset", PRESETS)
def test_resident_bytes_are_counted_beside_the_prediction(preset: str) -> None:
    arch = moe_architecture(n_layers=1, vocab_size=512, hidden_size=512, moe_intermediate_size=256, n_experts=8)
    packed = RolloutWeights.pack(arch, PRESETS[preset], RandomTensors(arch), active(), version=0, n_positions=16)
    row = resident("random", packed, predict(arch, PRESETS[preset]))
    assert row.measured_bytes == packed.nbytes
    assert row.ratio == pytest.approx(1.0, abs=0.05)
    if preset in ("fp32", "bf16"):
        assert row.quantised_ratio is None
    else:
        assert row.quantised_ratio is not None
        assert 4.5 / 16 <= row.quantised_ratio <= 0.30
    assert row.to_json()["ratio"] == row.measured_bytes / row.predicted_bytes


def test_the_command_writes_tables_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    command = ["bench", "rollout", "--precision", "bf16,w4a4kv4", "--batch", "1,3", "--tokens", "4", "--prompt", "5"]
    assert main([*command, "--repeats", "2", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(file.read_text())
    ours = [row for row in written["rows"] if row["baseline"] == "halfbyte bf16"]
    assert [(row["precision"], row["batch"]) for row in ours] == [("w4a4kv4", 1), ("w4a4kv4", 3)]
    assert all(row.keys() >= COLUMNS and row["same_tokens"] for row in written["rows"])
    assert [row["precision"] for row in written["memory"]] == ["bf16", "w4a4kv4"]
    assert all(abs(row["ratio"] - 1) <= 0.05 for row in written["memory"])
    assert all(word in printed for word in ("decoding", "resident weights", "w4a4kv4"))


def test_missing_transformers_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    file = tmp_path / "rows.json"
    arguments = ["--precision", "bf16,w4a4kv4", "--batch", "1", "--tokens", "2", "--repeats", "1", "--json", str(file)]
    assert main(["bench", "rollout", *arguments]) == 0
    assert "halfbyte[transformers]" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert {row["baseline"] for row in written["rows"]} == {"halfbyte bf16"}
    assert len(written["notes"]) == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--batch", "1,x"], "--batch"),
        (["--batch", "0"], "--batch"),
        (["--tokens", "1"], "--tokens"),
        (["--repeats", "0"], "--repeats"),
        (["--precision", "w5a5"], "w5a5"),
        (["--tokens", "100000"], "256"),
        (["--model", "no/such/folder"], "no/such/folder"),
    ],
)
def test_a_wrong_flag_is_explained(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "rollout", *arguments]) == 2
    assert word in capsys.readouterr().err
