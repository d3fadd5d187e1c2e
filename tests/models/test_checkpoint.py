"""Reading model folders that transformers wrote, in every layout, and refusing those that are damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from halfbyte.errors import CheckpointError, NumericsError
from halfbyte.models import load_checkpoint, parameter_shapes
from halfbyte.models.checkpoint import check_finite

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def assert_holds(folder: Path, oracle: Any, **options: Any) -> None:
    """The folder gives exactly the parameters of the oracle's model."""
    checkpoint = load_checkpoint(folder, **options)
    theirs = {name: parameter.detach() for name, parameter in oracle.model.named_parameters()}
    ours = checkpoint.parameters()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert list(checkpoint.tensors) == list(parameter_shapes(checkpoint.architecture))


def test_single_file(oracle: Any) -> None:
    assert_holds(oracle.folder, oracle)


def test_shards(oracle: Any, tmp_path: Path) -> None:
    oracle.model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_holds(tmp_path, oracle)


def test_layout_of_transformers_memory(oracle: Any, tmp_path: Path) -> None:
    oracle.model.save_pretrained(tmp_path, save_original_format=False)
    if oracle.model.config.model_type in ("qwen3_moe", "mixtral"):
        stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
        assert any(name.endswith("mlp.experts.gate_up_proj") for name in stored)
    assert_holds(tmp_path, oracle)


def test_half_precision_is_kept(moe: Any, tmp_path: Path) -> None:
    weights = {n: t.bfloat16() for n, t in safetensors.torch.load_file(moe.folder / "model.safetensors").items()}
    rewrite(moe.folder, tmp_path, weights)
    checkpoint = load_checkpoint(tmp_path)
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {torch.bfloat16}
    assert {p.dtype for p in checkpoint.parameters().values()} == {torch.bfloat16}
    assert {p.dtype for p in checkpoint.parameters(dtype=torch.float32).values()} == {torch.float32}


def stacked(oracle: Any, order: str) -> dict[str, torch.Tensor]:
    """The oracle's parameters as in memory, gate_up rows in the given order."""
    weights = {name: p.detach().clone() for name, p in oracle.model.named_parameters()}
    for name in weights:
        if name.endswith("gate_up_proj") and order == "interleaved":
            gate, up = weights[name].chunk(2, dim=1)
            weights[name] = torch.stack([gate, up], dim=2).flatten(1, 2)
    return weights


def test_gpt_oss_interleaved_rows_are_declared_never_guessed(moe: Any, tmp_path: Path) -> None:
    rewrite(moe.folder, tmp_path, stacked(moe, "interleaved"))
    assert_holds(tmp_path, moe, expert_rows="interleaved")
    undeclared = load_checkpoint(tmp_path).parameters()
    theirs = dict(moe.model.named_parameters())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert not torch.equal(undeclared[name], theirs[name].detach())
    with pytest.raises(CheckpointError, match="expert_rows"):
        load_checkpoint(tmp_path, expert_rows="guess")  # type: ignore[arg-type]


def rewrite(source: Path, target: Path, weights: dict[str, torch.Tensor], **config: Any) -> None:
    """A copy of a folder with other weights and changed config keys (None removes a key)."""
    values = json.loads((source / "config.json").read_text()) | config
    values = {key: value for key, value in values.items() if key not in config or value is not None}
    (target / "config.json").write_text(json.dumps(values))
    safetensors.torch.save_file({n: t.contiguous().clone() for n, t in weights.items()}, target / "model.safetensors")


@pytest.mark.parametrize(
    ("flag", "head", "policy", "expected"),
    [
        (True, "absent", "auto", "tied"),
        (True, "equal", "auto", "tied"),
        (True, "other", "auto", "error"),
        (False, "other", "auto", "separate"),
        (False, "equal", "auto", "separate"),
        (False, "absent", "auto", "tied, noted"),
        (None, "absent", "auto", "tied, noted"),
        (None, "equal", "auto", "tied, noted"),
        (None, "other", "auto", "separate"),
        (True, "other", "tied", "tied"),
        (False, "other", "tied", "tied, noted"),
        (True, "other", "separate", "separate"),
        (True, "absent", "separate", "error"),
    ],
)
def test_vllm_45543_ties_are_found_and_respected(
    dense: Any, tmp_path: Path, flag: bool | None, head: str, policy: Any, expected: str
) -> None:
    weights = safetensors.torch.load_file(dense.folder / "model.safetensors")
    other = weights.pop(HEAD)
    if head != "absent":
        weights[HEAD] = weights[EMBEDDING] if head == "equal" else other
    rewrite(dense.folder, tmp_path, weights, tie_word_embeddings=flag)
    if expected == "error":
        with pytest.raises(CheckpointError, match="lm_head"):
            load_checkpoint(tmp_path, ties=policy)
        return
    checkpoint = load_checkpoint(tmp_path, ties=policy)
    assert checkpoint.architecture.tie_embeddings == expected.startswith("tied")
    assert (HEAD in checkpoint.tensors) == (expected == "separate")
    assert bool(checkpoint.notes) == expected.endswith("noted")


def test_skyrl_missing_tied_head_is_a_declared_policy(dense: Any, tmp_path: Path) -> None:
    weights = safetensors.torch.load_file(dense.folder / "model.safetensors")
    del weights[HEAD]
    rewrite(dense.folder, tmp_path, weights, tie_word_embeddings=False)
    assert "lm_head.weight is tied" in load_checkpoint(tmp_path).notes[0]
    with pytest.raises(CheckpointError, match=r"missing: 1 \(lm_head\.weight\)"):
        load_checkpoint(tmp_path, ties="separate")
    with pytest.raises(CheckpointError, match="ties"):
        load_checkpoint(tmp_path, ties="maybe")  # type: ignore[arg-type]


def test_one_negative_zero_is_not_a_tie(dense: Any, tmp_path: Path) -> None:
    weights = safetensors.torch.load_file(dense.folder / "model.safetensors")
    weights[EMBEDDING][3, 4] = 0.0
    weights[HEAD] = weights[EMBEDDING].clone()
    weights[HEAD][3, 4] = -0.0
    rewrite(dense.folder, tmp_path, weights, tie_word_embeddings=None)
    assert not load_checkpoint(tmp_path).architecture.tie_embeddings


def test_trl_7039_every_eos_id_is_found(dense: Any, tmp_path: Path) -> None:
    shutil.copytree(dense.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 3]}')
    assert load_checkpoint(tmp_path).eos_ids == (2, 3, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert load_checkpoint(tmp_path).eos_ids == (2, 3, 5)
    (tmp_path / "generation_config.json").unlink()
    assert load_checkpoint(tmp_path).eos_ids == (2, 3)
    for wrong in ('{"eos_token_id": 96}', '{"eos_token_id": "2"}', "[]", "{"):
        (tmp_path / "generation_config.json").write_text(wrong)
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            load_checkpoint(tmp_path)


Damage = Callable[[dict[str, torch.Tensor]], None]


def drop(name: str) -> Damage:
    return lambda weights: weights.__delitem__(name)


def put(name: str, tensor: torch.Tensor) -> Damage:
    return lambda weights: weights.update({name: tensor})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop("model.layers.1.self_attn.q_norm.weight"), ["missing: 1", "model.layers.1.self_attn.q_norm.weight"]),
        (drop("model.layers.2.mlp.experts.3.up_proj.weight"), ["missing: 1", "experts.3.up_proj"]),
        (put("model.layers.9.extra", torch.zeros(2)), ["unexpected: 1", "model.layers.9.extra"]),
        (put("model.norm.weight", torch.ones(31)), ["mis-shaped: 1", "model.norm.weight [31] instead of [32]"]),
        (put("model.norm.weight", torch.ones(32, dtype=torch.int8)), ["not FP32", "model.norm.weight (torch.int8)"]),
        (put("model.layers.1.mlp.experts.down_proj", torch.zeros(4, 32, 24)), ["unexpected: 1", "experts.down_proj"]),
    ],
)
def test_tensors_that_do_not_fit_are_listed(moe: Any, tmp_path: Path, damage: Damage, words: list[str]) -> None:
    weights = safetensors.torch.load_file(moe.folder / "model.safetensors")
    damage(weights)
    rewrite(moe.folder, tmp_path, weights)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path)
    assert [word for word in words if word not in str(caught.value)] == []


def test_one_message_lists_everything_wrong(moe: Any, tmp_path: Path) -> None:
    weights = stacked(moe, "concatenated")
    weights["model.layers.1.mlp.experts.gate_up_proj"] = weights["model.layers.1.mlp.experts.gate_up_proj"].mT
    del weights["model.norm.weight"]
    weights["stray"] = torch.zeros(1)
    rewrite(moe.folder, tmp_path, weights)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path)
    message = str(caught.value)
    assert "missing: 1 (model.norm.weight)" in message
    assert "unexpected: 1 (stray)" in message
    assert "gate_up_proj [4, 32, 48] instead of [4, 48, 32]" in message


def test_recomputed_buffers_of_old_checkpoints_are_ignored(dense: Any, tmp_path: Path) -> None:
    weights = safetensors.torch.load_file(dense.folder / "model.safetensors")
    rewrite(dense.folder, tmp_path, {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert_holds(tmp_path, dense)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_finite_is_named(moe: Any, tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    weights = {n: t.to(dtype) for n, t in safetensors.torch.load_file(moe.folder / "model.safetensors").items()}
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    weights[name][-1, -1] = value
    rewrite(moe.folder, tmp_path, weights)
    with pytest.raises(NumericsError) as caught:
        load_checkpoint(tmp_path)
    assert f"{name!r} has 1 NaN or infinite" in str(caught.value)
    assert load_checkpoint(tmp_path, finite=False).tensors[name].isfinite().logical_not().sum() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bad_value_is_found_wherever_it_is(dtype: torch.dtype) -> None:
    for length in (1, 7, 64, 259):
        for at in range(length):
            for value in (float("nan"), float("inf"), float("-inf")):
                tensor = torch.linspace(-3, 3, length).to(dtype)
                tensor[at] = value
                with pytest.raises(NumericsError, match=f"1 NaN or infinite values of {length}"):
                    check_finite(tensor, "x")
    check_finite(torch.full((5,), torch.finfo(dtype).max, dtype=dtype), "x")
    check_finite(torch.empty(0, 3, dtype=dtype), "x")


def sharded(oracle: Any, folder: Path) -> dict[str, Any]:
    oracle.model.save_pretrained(folder, max_shard_size="20KB")
    return json.loads((folder / "model.safetensors.index.json").read_text())  # type: ignore[no-any-return]


def test_missing_and_truncated_shards_are_named(dense: Any, tmp_path: Path) -> None:
    index = sharded(dense, tmp_path)
    shard = tmp_path / index["weight_map"]["model.norm.weight"]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="cut short") as caught:
        load_checkpoint(tmp_path)
    assert shard.name in str(caught.value)
    shard.unlink()
    with pytest.raises(CheckpointError, match="missing") as caught:
        load_checkpoint(tmp_path)
    assert shard.name in str(caught.value)


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "a\\b.safetensors", "..safetensors", "x.bin", ""],
)
def test_modelexpress_716_no_path_traversal_in_shard_names(dense: Any, tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "model"
    index = sharded(dense, folder)
    shutil.copy(dense.folder / "model.safetensors", tmp_path / "model.safetensors")
    index["weight_map"]["model.norm.weight"] = shard
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="as a shard"):
        load_checkpoint(folder)


def test_index_and_shards_must_agree(dense: Any, tmp_path: Path) -> None:
    index = sharded(dense, tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    weight_map = index["weight_map"]
    path.write_text(json.dumps({"weight_map": {**weight_map, "ghost": weight_map[EMBEDDING]}}))
    with pytest.raises(CheckpointError, match=r"lacks 1 \(ghost\)"):
        load_checkpoint(tmp_path)
    path.write_text(json.dumps({"weight_map": {n: s for n, s in weight_map.items() if n != "model.norm.weight"}}))
    with pytest.raises(CheckpointError, match=r"unlisted, 1 \(model\.norm\.weight\)"):
        load_checkpoint(tmp_path)
    for wrong in ("{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": ["a"]}'):
        path.write_text(wrong)
        with pytest.raises(CheckpointError, match="weight_map"):
            load_checkpoint(tmp_path)


def test_folders_without_a_model(dense: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model folder"):
        load_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_checkpoint(tmp_path)
    shutil.copy(dense.folder / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="no weights"):
        load_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="never read"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{'a': 1}")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_checkpoint(tmp_path)


def test_reading_one_tensor_of_a_sharded_folder_maps_the_file_only(dense: Any, tmp_path: Path) -> None:
    sharded(dense, tmp_path)
    tensors = load_checkpoint(tmp_path, finite=False).tensors
    a, b = tensors["model.norm.weight"], tensors["model.norm.weight"]
    assert a.data_ptr() == b.data_ptr()  # two views of one map, not two copies
    with pytest.raises(KeyError):
        tensors["absent"]
