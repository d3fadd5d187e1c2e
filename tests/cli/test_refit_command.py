"""``halfbyte refit`` on real checkpoints and stores: what is printed, what is written, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from halfbyte.cli.main import main
from halfbyte.refit.store import FilesystemStore

Arrays = dict[str, np.ndarray]


def checkpoint(folder: Path, seed: int = 0, flips: int = 0) -> Path:
    """A checkpoint of two shards; ``flips`` bits differ from ``seed``'s."""
    rng = np.random.default_rng(seed)
    tensors = {f"w{i}": rng.integers(0, 2**16, (40, 30), dtype=np.uint16).view(np.float16) for i in range(4)}
    for i in range(flips):
        tensors[f"w{i % 4}"].view(np.uint16).reshape(-1)[i] ^= 1
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: tensors[n] for n in ("w0", "w1")}, folder / "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in ("w2", "w3")}, folder / "model-00002-of-00002.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def arrays(folder: Path) -> dict[str, bytes]:
    return {n: a.tobytes() for path in folder.glob("*.safetensors") for n, a in load_file(path).items()}


def halfbyte(*words: object) -> int:
    return main(["refit", *map(str, words)])


def test_publish_follow_verify_log_and_gc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    first, second = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", flips=7)
    assert halfbyte("publish", first, "--store", store) == 0
    assert "a version 0: full" in capsys.readouterr().out
    assert halfbyte("follow", "--store", store, "--folder", tmp_path / "served", "--once") == 0
    assert "nothing -> version 0: full" in capsys.readouterr().out
    assert arrays(tmp_path / "served" / "current") == arrays(first)

    assert halfbyte("publish", second, "--store", store, "--profile", "max", "--version", 5) == 0
    assert "a version 5: skip, 0.15% of the elements" in capsys.readouterr().out
    assert halfbyte("follow", "--store", store, "--folder", tmp_path / "served", "--once") == 0
    assert "version 0 -> version 5: skip, 7 elements" in capsys.readouterr().out
    assert arrays(tmp_path / "served" / "current") == arrays(second)
    assert halfbyte("follow", "--store", store, "--folder", tmp_path / "served", "--once") == 0
    assert "nothing to do: version 5" in capsys.readouterr().out

    assert halfbyte("verify", "--store", store, "--folder", tmp_path / "served") == 0
    assert "0 damaged, 0 tensors differ" in capsys.readouterr().out
    assert halfbyte("verify", "--store", store, "--folder", first) == 1
    assert "1 of 1 blocks differ" in capsys.readouterr().out

    assert halfbyte("log", "--store", store, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["version"], r["kind"], r["parent"], r["head"]) for r in rows] == [
        (0, "full", None, False),
        (5, "skip", 0, True),
    ]
    assert rows[1]["changed"] == 7
    assert halfbyte("log", "--store", store) == 0
    assert "<- HEAD" in capsys.readouterr().out
    assert halfbyte("gc", "--store", store, "--keep", 1, "--grace", 0) == 0
    assert "ways forgotten" in capsys.readouterr().out
    assert halfbyte("verify", "--store", store) == 0, "what a new reader needs is still there"


def test_follow_starts_from_a_local_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, first = tmp_path / "store", checkpoint(tmp_path / "a")
    halfbyte("publish", first, "--store", store)
    halfbyte("publish", checkpoint(tmp_path / "b", flips=3), "--store", store)
    capsys.readouterr()
    code = halfbyte("follow", "--store", store, "--folder", tmp_path / "served", "--source", first, "--once")
    assert code == 0
    assert "delta" in capsys.readouterr().out
    assert (tmp_path / "served" / "current" / "config.json").read_text() == "{}"
    assert arrays(tmp_path / "served" / "current") == arrays(tmp_path / "b")


def test_verify_names_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    halfbyte("publish", checkpoint(tmp_path / "a"), "--store", store)
    halfbyte("publish", checkpoint(tmp_path / "b", flips=5), "--store", store)
    opened = FilesystemStore(store)
    key = next(e.key for e in opened.list("objects") if e.size < 2000)
    data = bytearray(opened.get(key))
    data[-1] ^= 1
    opened.put(key, bytes(data))
    capsys.readouterr()
    assert halfbyte("verify", "--store", store) == 1
    out = capsys.readouterr().out
    assert "delta 1 from 0:" in out
    assert "1 damaged" in out
    assert halfbyte("verify", "--store", store, "--quick") == 0, "manifests are whole"


def test_a_signed_store_is_read_with_its_key_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, key, other = tmp_path / "store", tmp_path / "key", tmp_path / "other"
    key.write_bytes(b"0123456789abcdef0123")
    other.write_bytes(b"another key of 20 b!")
    halfbyte("publish", checkpoint(tmp_path / "a"), "--store", store, "--key", key)
    assert halfbyte("verify", "--store", store, "--key", key) == 0
    capsys.readouterr()
    assert halfbyte("verify", "--store", store, "--key", other) == 1
    assert "signature" in capsys.readouterr().out
    assert halfbyte("follow", "--store", store, "--folder", tmp_path / "s", "--key", other, "--once") == 2
    assert "signature" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["publish", "{empty}", "--store", "{store}"], "no tensors"),
        (["publish", "{ckpt}", "--store", "ftp://x"], "unknown kind of store"),
        (["follow", "--store", "{store}", "--folder", "{f}", "--interval", "0"], "--interval"),
        (["follow", "--store", "{store}", "--folder", "{f}", "--once", "--keep", "0"], "--keep"),
        (["follow", "--store", "{store}", "--folder", "{f}", "--once", "--name", "../x"], "not a reader's name"),
        (["publish", "{ckpt}", "--store", "{store}", "--anchor-every", "-1"], "--anchor-every"),
        (["gc", "--store", "{store}", "--keep", "0"], "--keep"),
        (["plan", "--change-rate", "3"], "3% is 0.03"),
        (["bench", "--elements", "0"], "--elements"),
        (["verify", "--store", "{store}", "--quick", "--folder", "{f}"], "--quick"),
    ],
)
def test_mistakes_get_an_answer(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    names = {
        "empty": tmp_path / "empty",
        "store": tmp_path / "s",
        "ckpt": checkpoint(tmp_path / "c"),
        "f": tmp_path / "f",
    }
    assert halfbyte(*(word.format(**names) for word in words)) == 2
    assert message in capsys.readouterr().err


def test_an_empty_store_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["verify"], ["log"], ["gc"], ["follow", "--folder", tmp_path / "f", "--once"]):
        assert halfbyte(*words, "--store", tmp_path / "nothing") == 0
    assert "empty" in capsys.readouterr().out


def test_a_store_that_lost_its_head_is_not_called_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert halfbyte("publish", checkpoint(tmp_path / "a"), "--store", tmp_path / "s") == 0
    (tmp_path / "s" / "HEAD").unlink()
    for command in ("verify", "log"):
        assert halfbyte(command, "--store", tmp_path / "s") == 1
    out = capsys.readouterr()
    assert "HEAD is missing" in out.out
    assert "HEAD is missing" in out.err


def test_tensors_that_come_or_change_shape_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, words = tmp_path / "c", ("--store", tmp_path / "s")
    follow = ("follow", *words, "--folder", tmp_path / "f", "--once")
    folder.mkdir()
    save_file({"a": np.zeros(5), "b": np.zeros(3)}, folder / "model.safetensors")
    assert halfbyte("publish", folder, *words) == halfbyte(*follow) == 0
    assert "full, 8 elements" in capsys.readouterr().out
    save_file({"a": np.zeros((5, 1)), "c": np.zeros(2)}, folder / "model.safetensors")
    assert halfbyte("publish", folder, *words) == halfbyte(*follow) == 0
    assert ", 7 elements" in capsys.readouterr().out


def test_plan_prints_the_cross_region_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert halfbyte("plan") == 0
    out = capsys.readouterr().out
    assert "1e+12 parameters, 3.00% changed" in out
    assert "times sooner" in out
    assert halfbyte("plan", "--json", "--parameters", "7e9", "--link", "1000", "--ranks", "1") == 0
    cost = json.loads(capsys.readouterr().out)
    assert cost["full_seconds"]["transfer"] == pytest.approx(14.0)


def test_bench_writes_the_rows_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    assert halfbyte("bench", "--elements", 1 << 20, "--repeats", 1, "--profile", "fast", "--json", out) == 0
    found = json.loads(out.read_text())
    row = found["rows"][0]
    assert {"scheme", "change_rate", "bytes_per_change", "encode_gb_per_s", "apply_gb_per_s", "exact"} <= row.keys()
    assert {r["scheme"] for r in found["rows"]} >= {"halfbyte fast", "dense XOR + zstd", "u16 gap + XOR + zstd"}
    assert len(found["fp4"]) == 6
    assert "deltas of BF16 weights" in capsys.readouterr().out
