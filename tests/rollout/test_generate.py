"""JSON lines in, JSON lines out: what is refused, and that a refusal writes nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from halfbyte.errors import DataError
from halfbyte.rollout import generate
from halfbyte.rollout.generate import generate_file

OPTIONS: dict[str, Any] = {
    "precision": "w4a4kv4",
    "max_tokens": 4,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": 0,
    "n": 1,
    "stop": (),
    "logprobs": False,
}


def run(folder: Path, *rows: dict[str, Any], out: Path | None = None, **options: Any) -> list[dict[str, Any]]:
    """The tiny policy on these rows; the second line of the file is blank."""
    source, target = folder / "in.jsonl", out or folder / "out.jsonl"
    source.write_text("\n\n".join(json.dumps(row) for row in rows))
    assert generate_file("tiny", source, target, **{**OPTIONS, **options}) == len(rows) * options.get("n", 1)
    return [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]


def refused(folder: Path, *rows: dict[str, Any], **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        run(folder, *rows, **options)
    assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl"]
    return str(caught.value)


def test_responses_come_in_order_with_the_fields_of_their_prompts(tmp_path: Path) -> None:
    lines = run(tmp_path, {"prompt": "53=", "id": "é"}, {"prompt": "12=", "id": 2}, n=2, logprobs=True)
    assert [(line["id"], line["sample"]) for line in lines] == [("é", 0), ("é", 1), (2, 0), (2, 1)]
    assert all(line["tokens"] == len(line["token_ids"]) == len(line["logprobs"]) <= 4 for line in lines)
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.parametrize(
    "row", [{"prompt": "\ud800"}, {"prompt": "5=", "z": "\ud800"}, {"prompt": "5=", "\udfff": [1]}]
)
def test_half_a_surrogate_pair_is_refused_with_file_and_line(tmp_path: Path, row: dict[str, Any]) -> None:
    assert "in.jsonl:3" in refused(tmp_path, {"prompt": "1="}, row)


def test_prompts_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("in.jsonl")
    for name in ("in.jsonl", "link"):
        with pytest.raises(DataError, match="take the place of the prompts"):
            run(tmp_path, {"prompt": "1="}, out=tmp_path / name)
        assert json.loads((tmp_path / "in.jsonl").read_text()) == {"prompt": "1="}


@pytest.mark.parametrize("field", ["sample", "response", "finish_reason", "tokens"])
def test_a_field_that_the_output_uses_is_refused(tmp_path: Path, field: str) -> None:
    message = refused(tmp_path, {"prompt": "1="}, {"prompt": "5=", field: "mine"})
    assert "in.jsonl:3" in message
    assert field in message


def test_fields_of_log_probs_are_taken_only_where_they_are_written(tmp_path: Path) -> None:
    assert run(tmp_path, {"prompt": "5=", "token_ids": "mine"})[0]["token_ids"] == "mine"
    (tmp_path / "out.jsonl").unlink()
    assert "token_ids" in refused(tmp_path, {"prompt": "5=", "token_ids": "mine"}, logprobs=True)


def test_a_prompt_that_does_not_fit_is_named(tmp_path: Path) -> None:
    assert "in.jsonl:3" in refused(tmp_path, {"prompt": "1="}, {"prompt": "1" * 300}, max_tokens=None)
    message = refused(tmp_path, {"prompt": "1="}, {"prompt": "1" * 250}, max_tokens=20)
    assert "in.jsonl:3" in message
    assert "--max-tokens to 6" in message


def test_without_a_limit_a_response_has_the_room_that_is_left(tmp_path: Path) -> None:
    free = run(tmp_path, {"prompt": "1" * 250}, {"prompt": "53="}, max_tokens=None, n=8)
    given = run(tmp_path, {"prompt": "1" * 250}, max_tokens=6, n=8)
    assert [line["response"] for line in free[:8]] == [line["response"] for line in given]
    assert max(line["tokens"] for line in free[:8]) <= 6


def test_a_target_that_cannot_be_written_is_refused_before_the_model_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(path: str) -> None:
        raise AssertionError("the model was opened")

    monkeypatch.setattr(generate, "open_model", unexpected)
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "1="}')
    for target in (tmp_path, source / "out.jsonl", source / "deeper" / "out.jsonl", tmp_path / ("x" * 300)):
        with pytest.raises(DataError) as caught:
            generate_file("tiny", source, target, **OPTIONS)
        assert str(target) in str(caught.value)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_a_failure_leaves_the_old_output_and_no_new_folders(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("")
    old = tmp_path / "out.jsonl"
    old.write_text("old")
    for target in (old, tmp_path / "a" / "b" / "out.jsonl"):
        with pytest.raises(DataError):
            run(tmp_path, {"prompt": "1" * 300}, out=target)
    assert old.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]
