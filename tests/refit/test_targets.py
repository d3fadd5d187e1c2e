"""Targets: torch modules, checkpoint folders, arrays; each against the library that owns the format."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refit_case import OPTIONS, EngineHooks, Trainer, arrays_target, checkpoint, read_checkpoint, same, zeros_like

from halfbyte.refit.adapters.arrays import ArraysTarget
from halfbyte.refit.adapters.folder import FolderTarget
from halfbyte.refit.adapters.module import ModuleTarget, module_tensors
from halfbyte.refit.errors import CorruptError, LayoutError, TargetError, WrongBaseError
from halfbyte.refit.patch import BlockPatch, patch_between, write_block
from halfbyte.refit.publisher import Publisher
from halfbyte.refit.shards import read_shard
from halfbyte.refit.store import MemoryStore
from halfbyte.refit.subscriber import Subscriber

torch = pytest.importorskip("torch")


# ---- patches


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_patch_goes_both_ways_from_any_mixture(data: st.DataObject) -> None:
    """Whatever of the new values is written, writing one side whole gives that side."""
    unit = data.draw(st.sampled_from([1, 2, 4, 8]))
    count = data.draw(st.integers(1, 60))
    kind = np.dtype(f"<u{unit}")
    values = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    old, new = (np.array(data.draw(values), kind) for _ in range(2))
    patch = patch_between(old.view(np.uint8), new.view(np.uint8), unit, begin=8)
    if patch is None:
        assert np.array_equal(old, new)
        return
    mixture = np.where(np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count))), old, new)
    for side, wanted in (("new", new), ("old", old)):
        buffer = np.concatenate([np.full(8, 7, np.uint8), mixture.view(np.uint8), np.full(8, 9, np.uint8)])
        write_block(buffer, patch, side)
        assert buffer[:8].tolist() == [7] * 8
        assert buffer[-8:].tolist() == [9] * 8
        if patch.positions is not None or side == "new":
            assert np.array_equal(buffer[8:-8].view(kind), wanted)


def test_a_write_that_meets_other_values_writes_nothing() -> None:
    old, new = np.arange(20, dtype=np.uint8), np.arange(20, dtype=np.uint8)
    new[[3, 9]] = 200
    patch = patch_between(old, new, 1)
    data = old.copy()
    data[9] = 1
    before = data.copy()
    with pytest.raises(WrongBaseError, match="1 values changed"):
        write_block(data, patch, "new", expect=("old",))
    assert np.array_equal(data, before)
    write_block(data, patch, "new")
    assert np.array_equal(data, new)


def test_whole_block_patches_do_not_spill() -> None:
    """A block of which all changes is written by position-less patch, at its own place only."""
    data = np.zeros(64, np.uint8)
    patch = BlockPatch(16, None, np.zeros(8, np.uint16), np.full(8, 0x0101, np.uint16))
    write_block(data, patch, "new", expect=("old",))
    assert data.tolist() == [0] * 16 + [1] * 16 + [0] * 32


# ---- torch modules


class Net(torch.nn.Module):
    """Bias, buffer, a tied head, several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(30, 8)
        self.layer = torch.nn.Linear(8, 8).to(torch.bfloat16)
        self.head = torch.nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("cache", torch.zeros(3), persistent=False)


def test_module_tensors_names_a_tie_once() -> None:
    net = Net()
    assert list(module_tensors(net)) == ["embed.weight", "layer.weight", "layer.bias"]
    assert "mean" in module_tensors(net, buffers=True)
    assert "cache" not in module_tensors(net, buffers=True)
    assert "model.embed.weight" in module_tensors(net, rename=lambda n: f"model.{n}")
    with pytest.raises(LayoutError, match="renamed to 'x'"):
        module_tensors(net, rename=lambda n: "x")


def test_a_module_follows_another_module() -> None:
    torch.manual_seed(0)
    trainer, engine = Net(), Net()
    store = MemoryStore()
    publisher = Publisher(store, "run", options=OPTIONS)
    hooks = EngineHooks()
    subscriber = Subscriber(store, ModuleTarget(engine, hooks=hooks, buffers=True))
    pointers = [p.data_ptr() for p in engine.parameters()]
    for _ in range(4):
        publisher.publish(trainer.state_dict())
        subscriber.refit()
        for (name, a), b in zip(trainer.state_dict().items(), engine.state_dict().values(), strict=True):
            assert a.view(torch.uint8).equal(b.view(torch.uint8)), name
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.add_(torch.randn_like(parameter) * (torch.rand_like(parameter) < 0.1))
            trainer.mean[2] = float("nan")
    assert engine.head.weight is engine.embed.weight
    assert pointers == [p.data_ptr() for p in engine.parameters()]  # compiled graphs and pointers stay good
    assert hooks.events.count("pause") == 4


@pytest.mark.parametrize("fail", [False, True])
def test_parameters_that_cannot_be_patched_as_bytes_are_patched_where_they_are(fail: bool) -> None:
    """Non-contiguous parameters take the way that parameters on a device take."""
    torch.manual_seed(0)
    engine = torch.nn.ParameterDict(
        {
            "a": torch.nn.Parameter(torch.randn(8, 6, dtype=torch.bfloat16).t(), requires_grad=False),
            "b": torch.nn.Parameter(torch.randn(5, 4).t(), requires_grad=False),
            "c": torch.nn.Parameter(torch.randint(0, 9, (4, 3), dtype=torch.uint8).t(), requires_grad=False),
        }
    )
    assert not engine["a"].is_contiguous()
    weights = {n: p.detach().contiguous().clone() for n, p in engine.items()}
    store = MemoryStore()
    publisher = Publisher(store, "run", options=OPTIONS)
    publisher.publish(weights)
    target = ModuleTarget(engine)
    subscriber = Subscriber(store, target)
    subscriber.refit()
    for tensor in weights.values():
        tensor.view(-1)[::3] += 1
    publisher.publish(weights)
    if fail:
        old = {n: p.detach().clone() for n, p in engine.items()}
        plain, target.commit = target.commit, lambda update: (plain(update), 1 / 0)
        with pytest.raises(TargetError, match="ZeroDivisionError"):
            subscriber.refit()
        assert all(engine[n].equal(old[n]) for n in old)
        target.commit = plain
    subscriber.refit()
    assert all(engine[n].equal(weights[n]) for n in weights)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_module_on_a_gpu_follows() -> None:
    torch.manual_seed(0)
    trainer, engine = Net(), Net().cuda()
    store = MemoryStore()
    publisher = Publisher(store, "run", options=OPTIONS)
    subscriber = Subscriber(store, ModuleTarget(engine, buffers=True))
    for _ in range(3):
        publisher.publish(trainer.state_dict())
        subscriber.refit()
        for a, b in zip(trainer.state_dict().values(), engine.state_dict().values(), strict=True):
            assert a.view(torch.uint8).equal(b.cpu().view(torch.uint8))
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.add_(torch.randn_like(parameter) * (torch.rand_like(parameter) < 0.1))


def test_a_module_refuses_new_tensors_before_anything_is_written() -> None:
    net, store = Net(), MemoryStore()
    weights = {n: t.clone() for n, t in module_tensors(net).items()}
    publisher = Publisher(store, "run", options=OPTIONS)
    publisher.publish(weights)
    subscriber = Subscriber(store, ModuleTarget(net))
    subscriber.refit()
    weights["layer.bias"] = torch.zeros(9)
    weights["embed.weight"][0] += 1
    publisher.publish(weights)
    before = net.embed.weight.clone()
    with pytest.raises(LayoutError, match="fixed set of parameters"):
        subscriber.refit()
    assert net.embed.weight.equal(before)


# ---- checkpoint folders


def test_a_folder_follows_and_stays_an_ordinary_checkpoint(tmp_path: Path) -> None:
    trainer, store = Trainer(), MemoryStore()
    publisher = Publisher(store, "run", options=OPTIONS)
    source = checkpoint(tmp_path / "source", trainer.weights)
    publisher.publish(trainer.weights)
    before = {p.name: p.read_bytes() for p in source.iterdir()}
    target = FolderTarget(tmp_path / "out", source=source)
    subscriber = Subscriber(store, target)
    for _ in range(4):
        refit = subscriber.refit()
        assert same(read_checkpoint(tmp_path / "out" / "current"), trainer.weights)
        assert target.stamp() == refit.target
        assert (tmp_path / "out" / "current" / "config.json").read_text() == "{}"
        trainer.step()
        publisher.publish(trainer.weights)
    assert len(list((tmp_path / "out" / "versions").iterdir())) == 2
    assert {p.name: p.read_bytes() for p in source.iterdir()} == before
    again = FolderTarget(tmp_path / "out")
    assert again.stamp() == subscriber.held
    assert "full" not in Subscriber(store, again).refit().kinds


def test_unchanged_shards_are_links_and_open_files_stay_whole(tmp_path: Path) -> None:
    trainer, store = Trainer(), MemoryStore()
    publisher = Publisher(store, "run", options=OPTIONS)
    publisher.publish(trainer.weights)
    root = tmp_path / "out"
    subscriber = Subscriber(store, FolderTarget(root, source=checkpoint(tmp_path / "source", trainer.weights)))
    subscriber.refit()
    first = (root / "current").resolve()
    opened = {p.name: p.open("rb") for p in first.glob("*.safetensors")}
    bytes_before = {p.name: p.read_bytes() for p in first.glob("*.safetensors")}
    name = sorted(trainer.weights)[0]
    trainer.weights[name].reshape(-1)[0] += 1
    publisher.publish(trainer.weights)
    subscriber.refit()
    second = (root / "current").resolve()
    linked = {p.name for p in second.glob("*.safetensors") if os.path.samefile(p, first / p.name)}
    changed = {p.name for p in second.glob("*.safetensors")} - linked
    assert (len(linked), len(changed)) == (1, 1)
    for shard, file in opened.items():
        with file:
            assert file.read() == bytes_before[shard]


def test_a_folder_can_begin_with_nothing_and_change_its_tensors(tmp_path: Path) -> None:
    trainer, store = Trainer(), MemoryStore()
    publisher = Publisher(store, "run", options=OPTIONS)
    publisher.publish(trainer.weights)
    target = FolderTarget(tmp_path / "out", shard_bytes=6000)
    subscriber = Subscriber(store, target)
    subscriber.refit()
    current = tmp_path / "out" / "current"
    assert same(read_checkpoint(current), trainer.weights)
    index = json.loads((current / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == trainer.weights.keys()
    for name, file in index["weight_map"].items():
        assert name in read_shard(current / file)
    trainer.weights["added"] = np.arange(9, dtype=np.float32)
    del trainer.weights["norm.weight"]
    trainer.step(0.1)
    publisher.publish(trainer.weights)
    subscriber.refit()
    assert same(read_checkpoint(current), trainer.weights)


def test_a_damaged_folder_is_repaired_in_a_copy(tmp_path: Path) -> None:
    trainer, store = Trainer(), MemoryStore()
    Publisher(store, "run", options=OPTIONS).publish(trainer.weights)
    root = tmp_path / "out"
    Subscriber(store, FolderTarget(root), folder=tmp_path / "state").refit()
    assert Subscriber(store, FolderTarget(root), folder=tmp_path / "state").refit() is None
    for _ in range(2):
        path = root / "current" / "model.safetensors"
        place = read_shard(path)["layers.0.weight"].begin
        data = bytearray(path.read_bytes())
        data[place + 100] ^= 1
        path.resolve().write_bytes(data)
        refit = Subscriber(store, FolderTarget(root), folder=tmp_path / "state").refit()
        assert (refit.kinds, refit.repaired_blocks) == ((), 1)
        assert refit.fetched_bytes < trainer.bytes
        assert same(read_checkpoint(root / "current"), trainer.weights)


def test_a_folder_goes_back_when_its_server_fails(tmp_path: Path) -> None:
    trainer, store = Trainer(), MemoryStore()
    publisher = Publisher(store, "run", options=OPTIONS)
    publisher.publish(trainer.weights)
    hooks = EngineHooks()
    target = FolderTarget(tmp_path / "out", source=checkpoint(tmp_path / "source", trainer.weights), hooks=hooks)
    subscriber = Subscriber(store, target)
    subscriber.refit()
    old, link = trainer.copy(), os.readlink(tmp_path / "out" / "current")
    trainer.step()
    publisher.publish(trainer.weights)
    plain = target.commit

    def fail(update: Any) -> None:
        plain(update)
        raise OSError("the server did not take it")

    target.commit = fail  # type: ignore[method-assign]
    with pytest.raises(TargetError, match="did not take it"):
        subscriber.refit()
    assert os.readlink(tmp_path / "out" / "current") == link
    assert same(read_checkpoint(tmp_path / "out" / "current"), old)
    target.commit = plain  # type: ignore[method-assign]
    subscriber.refit()
    assert same(read_checkpoint(tmp_path / "out" / "current"), trainer.weights)


def test_a_full_disk_while_staging_changes_nothing(tmp_path: Path) -> None:
    trainer, store = Trainer(), MemoryStore()
    publisher = Publisher(store, "run", options=OPTIONS)
    publisher.publish(trainer.weights)
    target = FolderTarget(tmp_path / "out", source=checkpoint(tmp_path / "source", trainer.weights))
    subscriber = Subscriber(store, target)
    subscriber.refit()
    old = trainer.copy()
    trainer.step()
    publisher.publish(trainer.weights)

    def full(source: Path, path: Path) -> None:
        raise OSError(28, "No space left on device")

    plain, target.disk.copy = target.disk.copy, full  # type: ignore[method-assign]
    with pytest.raises(TargetError, match="No space left"):
        subscriber.refit()
    assert same(read_checkpoint(tmp_path / "out" / "current"), old)
    target.disk.copy = plain  # type: ignore[method-assign]
    subscriber.refit()
    assert same(read_checkpoint(tmp_path / "out" / "current"), trainer.weights)
    assert not list((tmp_path / "out" / "versions").glob(".*"))


@pytest.mark.parametrize("damage", ["truncate", "grow", "length", "overlap", "shape", "dtype", "json", "short"])
def test_a_damaged_checkpoint_is_not_opened(tmp_path: Path, damage: str) -> None:
    from safetensors.numpy import save

    data = save({"a": np.ones((4, 4), np.float32), "b": np.ones(3, np.float16)})
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    if damage == "overlap":
        header["b"]["data_offsets"] = [0, 6]
    elif damage == "shape":
        header["a"]["shape"] = [4, 5]
    elif damage == "dtype":
        header["a"]["dtype"] = "Q7"
    raw = json.dumps(header).encode()
    made = len(raw).to_bytes(8, "little") + raw + body
    made = {
        "truncate": made[:-1], "grow": made + b"x", "length": (2**60).to_bytes(8, "little") + made[8:],
        "json": made[:8] + b"[" + made[9:], "short": b"abc",
    }.get(damage, made)  # fmt: skip
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(made)
    with pytest.raises(CorruptError):
        FolderTarget(tmp_path / "out", source=folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    folder = tmp_path / "source"
    folder.mkdir()
    for n in range(2):
        save_file({"a": np.ones(3, np.float32)}, folder / f"{n}.safetensors")
    with pytest.raises(CorruptError, match="as well"):
        FolderTarget(tmp_path / "out", source=folder)
    with pytest.raises(CorruptError, match="no such checkpoint"):
        FolderTarget(tmp_path / "other", source=tmp_path / "nowhere")


# ---- arrays


def test_packed_codes_are_tensors_whose_info_is_given() -> None:
    """4-bit codes in uint8 arrays: the info says F4 and the logical shape."""
    from halfbyte.refit.arrays import TensorInfo

    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (40, 32), dtype=np.uint8)
    infos = {"w.codes": TensorInfo("w.codes", "F4", (40, 64))}
    store = MemoryStore()
    publisher = Publisher(store, "run", options=OPTIONS)
    publisher.publish({"w.codes": codes}, infos=infos)
    target = ArraysTarget({"w.codes": np.zeros_like(codes)}, infos=infos)
    subscriber = Subscriber(store, target)
    for _ in range(3):
        subscriber.refit()
        assert same(target.arrays, {"w.codes": codes})
        codes.reshape(-1)[random.random(codes.size) < 0.05] ^= 0x30
        publisher.publish({"w.codes": codes}, infos=infos)
    with pytest.raises(LayoutError, match="bytes for"):
        publisher.publish({"w.codes": codes[:-1]}, infos=infos)


def test_read_only_and_strided_arrays_are_refused_while_staging() -> None:
    trainer, store = Trainer(), MemoryStore()
    publisher = Publisher(store, "run", options=OPTIONS)
    publisher.publish(trainer.weights)
    target = arrays_target(zeros_like(trainer.weights))
    target.arrays["embed.weight"].flags.writeable = False
    with pytest.raises(Exception, match="read-only"):
        Subscriber(store, target).refit()
    assert not target.arrays["layers.0.weight"].any()
