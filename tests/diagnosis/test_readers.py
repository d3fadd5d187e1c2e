"""Trajectories of any trainer become the same table: columns by any of their names, JSON lines or parquet, padded or not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.diagnosis import ALIASES, TokenTable, parse_columns, read_tables
from halfbyte.errors import ConfigError, DataError, MissingExtraError

#: trainer -> its names for (ids, rollout, learner, advantages, mask)
TRAINERS = {
    "halfbyte": ("response_ids", "logprobs", "learner_logprobs", "advantage", "mask"),
    "verl": ("responses", "rollout_log_probs", "old_log_probs", "advantages", "response_mask"),
    "trl": ("completion_ids", "sampling_per_token_logps", "old_per_token_logps", "advantages", "completion_mask"),
    "nemo_rl": ("output_ids", "generation_logprobs", "prev_logprobs", "advantages", "token_mask"),
    "prime_rl": ("completion_ids", "inference_logprobs", "trainer_logprobs", "advantages", "loss_mask"),
    "slime": ("tokens", "rollout_log_probs", "log_probs", "advantages", "loss_mask"),
}


def rows(count: int = 5, seed: int = 0, *, per_token: bool = False) -> list[tuple[Any, ...]]:
    """(ids, rollout, learner, advantage, mask) of responses of different length, some tokens masked."""
    draws = np.random.default_rng(seed)
    out = []
    for i in range(count):
        n = int(draws.integers(1, 9))
        rollout = (-draws.exponential(1.0, n)).astype(np.float32)
        learner = np.minimum(rollout + draws.normal(0, 0.05, n), 0).astype(np.float32)
        advantage: Any = float(np.float32(draws.normal()))
        mask = draws.integers(0, 2, n)
        mask[0] = 1
        out.append(
            (
                draws.integers(0, 50, n).tolist(),
                rollout.tolist(),
                learner.tolist(),
                [advantage] * n if per_token else advantage,
                mask.tolist(),
            )
        )
        assert i < count
    return out


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_parquet(path: Path, lines: list[dict[str, Any]]) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(lines), path)
    return path


def same(a: TokenTable, b: TokenTable) -> None:
    for name in ("lengths", "ids", "mask"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    for name in ("rollout_logp", "learner_logp", "advantages"):
        assert np.array_equal(getattr(a, name)[a.mask], getattr(b, name)[b.mask]), name


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("per_token", [False, True])
def test_columns_of_other_trainers(trainer: str, suffix: str, per_token: bool, tmp_path: Path) -> None:
    data = rows(per_token=per_token)
    lines = [dict(zip(TRAINERS[trainer], row)) for row in data]
    path = tmp_path / f"dump{suffix}"
    (write if suffix == ".jsonl" else write_parquet)(path, lines)
    (table,) = read_tables(path)
    assert table.step is None
    assert table.lengths.tolist() == [len(row[0]) for row in data]
    assert table.ids.tolist() == [i for row in data for i in row[0]]
    assert table.rollout_logp.tolist() == [x for row in data for x in row[1]]
    assert table.learner_logp.tolist() == [x for row in data for x in row[2]]
    advantages = [a for row in data for a in (row[3] if per_token else [row[3]] * len(row[0]))]
    assert table.advantages.tolist() == advantages
    assert table.mask.tolist() == [bool(m) for row in data for m in row[4]]
    assert table.sequence_index.tolist() == [i for i, row in enumerate(data) for _ in row[0]]


def test_names_of_ones_own(tmp_path: Path) -> None:
    lines = [dict(zip(("a", "b", "c", "d", "e"), row)) for row in rows()]
    path = write(tmp_path / "x.jsonl", lines)
    with pytest.raises(DataError, match=r"no column for response_ids[\s\S]*found a, b, c, d, e[\s\S]*--column"):
        read_tables(path)
    names = ("response_ids", "rollout_logprobs", "learner_logprobs", "advantages", "mask")
    columns = parse_columns(f"{name}={column}" for name, column in zip(names, "abcde"))
    usual = [dict(zip(TRAINERS["verl"], row)) for row in rows()]
    same(read_tables(path, columns)[0], read_tables(write(tmp_path / "y.jsonl", usual))[0])
    with pytest.raises(DataError, match="one of z; found"):
        read_tables(path, {**columns, "mask": "z"})
    for wrong in ("mask", "mask=", "maske=x"):
        with pytest.raises(ConfigError, match="names no column"):
            parse_columns([wrong])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), width=st.integers(9, 20), fill=st.sampled_from([None, 0.0, "nan"]))
def test_verl_7771_padding_changes_nothing_but_the_layout(
    seed: int, width: int, fill: Any, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("padded")
    data = rows(seed=seed)
    filler = float("nan") if fill == "nan" else fill
    padded = []
    for ids, rollout, learner, advantage, mask in data:
        rest = width - len(ids)
        padded.append(
            dict(
                zip(
                    TRAINERS["verl"],
                    (
                        ids + [0] * rest,
                        rollout + [filler] * rest,
                        learner + [filler] * rest,
                        advantage,
                        mask + [0] * rest,
                    ),
                )
            )
        )
    (a,) = read_tables(write(folder / "plain.jsonl", [dict(zip(TRAINERS["verl"], row)) for row in data]))
    (b,) = read_tables(write(folder / "padded.jsonl", padded))
    assert np.array_equal(a.gap[a.mask], b.gap[b.mask])
    assert np.array_equal(a.advantages[a.mask], b.advantages[b.mask])
    assert not b.gap[~b.mask].any()


def test_steps_become_tables_and_optional_columns_come_along(tmp_path: Path) -> None:
    lines = []
    for step in (7, 3):
        for row in rows(seed=step):
            n = len(row[0])
            more = {"step": step, "reward": 1.0, "versions": step, "turns": [0] if n < 3 else [0, 2]}
            lines.append(dict(zip(TRAINERS["halfbyte"], row)) | more)
    tables = read_tables(write(tmp_path / "x.jsonl", lines))
    assert [t.step for t in tables] == [3, 7]
    for table in tables:
        assert table.versions is not None
        assert table.rewards is not None
        assert table.turn_starts is not None
        assert set(table.versions.tolist()) == {table.step}
        assert table.rewards.tolist() == [1.0] * 5
        starts = np.flatnonzero(table.turn_starts).tolist()
        begin = np.concatenate([[0], np.cumsum(table.lengths)[:-1]])
        assert starts == sorted([*begin, *(b + 2 for b, n in zip(begin, table.lengths) if n >= 3)])


def test_files_of_a_run_folder_take_their_step_from_the_name(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    for step in (51, 1):
        lines = [dict(zip(TRAINERS["halfbyte"], row)) for row in rows(seed=step)]
        write(tmp_path / "trajectories" / f"step_{step:06d}.jsonl", lines)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert [t.step for t in read_tables(tmp_path)] == [1, 51]


GOOD = dict(zip(TRAINERS["halfbyte"], ([1, 2], [-1.0, -2.0], [-1.1, -2.1], 0.5, [1, 1])))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"logprobs": [-1.0]}, r"rollout_logprobs has shape \[1\][\s\S]*:2[\s\S]*2 response ids"),
        ({"logprobs": [-1.0, None]}, r"rollout_logprobs is nan on a token that counts[\s\S]*:2, token 1"),
        ({"learner_logprobs": [float("inf"), -1]}, "learner_logprobs is inf"),
        ({"learner_logprobs": [0.5, -1]}, "not above 0"),
        ({"advantage": None}, "advantages is nan"),
        ({"advantage": "high"}, "advantages cannot be used"),
        ({"response_ids": [1.5, 2]}, "not integers"),
        ({"response_ids": [[1, 2]]}, "shape"),
        ({"mask": [1]}, "mask has shape"),
        ({"logprobs": "x"}, "rollout_logprobs"),
        ({"turns": [5]}, "turns begin at"),
        ({"step": 1.5}, "step is 1.5"),
        ({"step": float("nan")}, "step is nan"),
        ({"step": float("inf")}, "step is inf"),
        ({"reward": "high"}, r"reward cannot be used[\s\S]*:2"),
        ({"reward": {"a": 1}}, "reward cannot be used"),
        ({"advantage": 1e308}, "advantages is inf[\\s\\S]*finite in float32"),
        ({"response_ids": [2**70, 2]}, "more than 64 bits"),
    ],
)
def test_rows_that_cannot_be_used_are_named(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    extra = {key: {"turns": [0], "step": 1, "reward": 1.0}[key] for key in change if key in ("turns", "step", "reward")}
    path = write(tmp_path / "x.jsonl", [GOOD | extra, GOOD | extra | change])
    with pytest.raises(DataError, match=match):
        read_tables(path)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no response to diagnose"),
        ("{}\n", "no column for response_ids"),
        ("[1]\n", "not a JSON object"),
        ("{\n", "not JSON"),
        (json.dumps(GOOD) + "\n{}\n", "the line lacks"),
    ],
)
def test_files_that_cannot_be_used_are_named(text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(DataError, match=match):
        read_tables(tmp_path / "x.jsonl")


def test_a_byte_order_mark_is_not_part_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(GOOD) + "\n", encoding="utf-8-sig")
    assert read_tables(tmp_path / "x.jsonl")[0].ids.tolist() == [1, 2]


def test_places_without_trajectories_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing here"):
        read_tables(tmp_path / "no")
    with pytest.raises(DataError, match="save_trajectories_every"):
        read_tables(tmp_path)
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no")
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="not a parquet file"):
        read_tables(tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        read_tables(tmp_path / "x.jsonl")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtraError, match=r"halfbyte\[parquet\]"):
        read_tables(tmp_path / "x.parquet")


def test_no_alias_stands_for_two_columns() -> None:
    names = [alias for aliases in ALIASES.values() for alias in aliases]
    assert len(names) == len(set(names))
