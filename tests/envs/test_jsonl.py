"""Data sets of the user's own, and everything that is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfbyte.envs import Environment, make_env, prompt_key
from halfbyte.errors import ConfigError, DataError


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def sums(n: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(first, first + n)]


def prompts(environment: Environment, split: Any) -> list[Any]:
    size = environment.size(split)
    assert size is not None
    return [environment.prompt(split, i) for i in range(size)]


def test_rows_become_prompts_in_order(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?", "name": "Ada"}]
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "1+1=", "answer": 2, "level": 1, "tags": ["x"]},
        "",
        {"prompt": chat, "answer": "5", "id": 17},
        {"prompt": "caf\u00e9 \u2028 line", "answer": "x"},
    )
    environment = make_env(f"jsonl:{path}", eval_share=0)
    first, second, third = prompts(environment, "train")
    assert (first.text, first.answer, first.metadata) == ("1+1=", 2, {"level": 1, "tags": ["x"]})
    assert first.id == "a.jsonl:1"
    assert list(second.messages) == chat
    assert (second.id, second.text) == ("17", None)
    assert (third.text, third.id) == ("caf\u00e9 \u2028 line", "a.jsonl:4")
    assert environment.start(first).step("2", []).reward == 1.0
    assert environment.start(first).step("3", []).reward == 0.0


def test_other_fields_can_hold_prompt_and_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "1+1=", "solution": "2", "prompt": "unrelated"})
    environment = make_env(f"jsonl:{path}", eval_share=0, prompt_field="question", answer_field="solution")
    prompt = environment.prompt("train", 0)
    assert (prompt.text, prompt.answer, prompt.metadata) == ("1+1=", "2", {"prompt": "unrelated"})


def test_windows_files_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": "b"}\r\n{"prompt": "c", "answer": "d"}')
    assert [p.text for p in prompts(make_env(f"jsonl:{path}", eval_share=0), "train")] == ["a", "c"]


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip), min_size=1),
    st.floats(0.1, 0.9),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shares_are_disjoint_by_hash_and_lose_nothing(tmp_path: Path, texts: list[str], share: float) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": t, "answer": "x"} for t in texts), *sums(200))
    environment = make_env(f"jsonl:{path}", eval_share=share)
    train, held_out = prompts(environment, "train"), prompts(environment, "eval")
    assert not {prompt_key(p) for p in train} & {prompt_key(p) for p in held_out}
    assert sorted(p.text for p in train + held_out) == sorted(texts + [row["prompt"] for row in sums(200)])
    assert len({p.id for p in train + held_out}) == len(texts) + 200


def test_a_row_stays_on_its_side_when_others_come(tmp_path: Path) -> None:
    small = make_env(f"jsonl:{write(tmp_path / 'a.jsonl', *sums(100))}")
    large = make_env(f"jsonl:{write(tmp_path / 'b.jsonl', *sums(100, 100), *sums(100))}")
    assert {p.text for p in prompts(small, "eval")} <= {p.text for p in prompts(large, "eval")}
    assert {p.text for p in prompts(small, "train")} <= {p.text for p in prompts(large, "train")}


def test_held_out_prompts_from_a_file(tmp_path: Path) -> None:
    train, held_out = write(tmp_path / "a.jsonl", *sums(5)), write(tmp_path / "b.jsonl", *sums(3, 5))
    environment = make_env(f"jsonl:{train}", eval_path=str(held_out))
    assert (environment.size("train"), environment.size("eval")) == (5, 3)
    assert [p.text for p in prompts(environment, "eval")] == ["5+1=", "6+1=", "7+1="]


def test_optimum_intel_1547_evaluation_prompts_among_the_training_prompts(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", *sums(10))
    same = [{"prompt": [{"role": "user", "content": " 3+1= "}], "answer": "4"}, {"prompt": "7+1=", "answer": "8"}]
    held_out = write(tmp_path / "b.jsonl", *sums(2, 90), *same)
    with pytest.raises(DataError, match="2 held-out prompts are also training prompts") as caught:
        make_env(f"jsonl:{train}", eval_path=str(held_out))
    assert f"{held_out}:3 is also {train}:4" in str(caught.value)
    with pytest.raises(DataError, match="10 held-out"):
        make_env(f"jsonl:{train}", eval_path=str(train))


GOOD = {"prompt": "1+1=", "answer": "2"}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "1+1=", "answer": "2"', "not JSON"),
        ("[1]", "expected an object"),
        ('{"prompt": NaN, "answer": "2"}', "NaN is not JSON"),
        ("[" * 100_000, "not JSON"),
        ({"promt": "1+1=", "answer": "2"}, "no field 'prompt'; found: promt, answer"),
        ({"prompt": "1+1=", "anwser": "2"}, "no answer in field 'answer'; found: anwser"),
        ({"prompt": "1+1=", "answer": None}, "no answer"),
        ({"prompt": "", "answer": "2"}, "prompt is empty"),
        ({"prompt": " \n", "answer": "2"}, "prompt is empty"),
        ({"prompt": 3, "answer": "2"}, "prompt is int"),
        ({"prompt": [], "answer": "2"}, "prompt is list"),
        ({"prompt": ["hi"], "answer": "2"}, r"prompt\[0\] is str"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, r"prompt\[0\] has no text in 'content'"),
        ({"prompt": [{"role": "user", "content": ["x"]}], "answer": "2"}, "no text in 'content'"),
        (
            {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "2"},
            "ends with the assistant's turn",
        ),
        ({"prompt": "a", "answer": ""}, "answer is empty"),
        ({"prompt": "a", "answer": ["b"]}, "answer is list"),
        ({"prompt": "a", "answer": "b", "id": []}, "id is"),
        ('{"prompt": "\\ud800", "answer": "b"}', "surrogate"),
    ],
)
def test_wrong_lines_are_named_with_file_and_line(tmp_path: Path, line: Any, problem: str) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, "", line)
    with pytest.raises(DataError, match=problem) as caught:
        make_env(f"jsonl:{path}", eval_share=0)
    assert f"{path}:3: " in str(caught.value)
    assert "1 of 2 lines" in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "b"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not UTF-8"):
        make_env(f"jsonl:{path}")


def test_many_wrong_lines_are_counted_and_a_few_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *["{}"] * 50, GOOD)
    with pytest.raises(DataError, match="50 of 51 lines") as caught:
        make_env(f"jsonl:{path}")
    assert f"{path}:5: " in str(caught.value)
    assert f"{path}:6: " not in str(caught.value)
    assert "45 more" in str(caught.value)


def test_ids_are_taken_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD | {"id": "x"}, {"prompt": "b", "answer": "c", "id": "x"})
    with pytest.raises(DataError, match=r"a\.jsonl:2: id 'x' is taken by .*a\.jsonl:1"):
        make_env(f"jsonl:{path}")


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_an_empty_data_set(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match="the data set is empty") as caught:
        make_env(f"jsonl:{path}")
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(DataError, match="cannot be read") as caught:
            make_env(f"jsonl:{path}")
        assert str(path) in str(caught.value)


def test_too_few_prompts_for_two_splits(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(DataError, match="fall into one split"):
        make_env(f"jsonl:{path}")
    environment = make_env(f"jsonl:{path}", eval_share=0)
    assert environment.size("eval") == 0
    for index in (-1, 1):
        with pytest.raises(IndexError):
            environment.prompt("train", index)
    with pytest.raises(IndexError):
        environment.prompt("eval", 0)


def test_answers_are_checked_for_the_scoring(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, {"prompt": "b", "answer": "seven"})
    with pytest.raises(DataError, match=r"a\.jsonl:2: answer 'seven' holds no number"):
        make_env(f"jsonl:{path}", scoring="numeric", eval_share=0)
    environment = make_env(f"jsonl:{path}", scoring="contains", eval_share=0)
    assert environment.start(environment.prompt("train", 1)).step("it is seven", []).correct


def test_a_reward_function_takes_any_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "answer": {"any": [1]}}, {"prompt": "b", "limit": 3})
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def score(response, answer, limit=0):\n    return len(response) - limit + (answer is not None)\n"
    )
    environment = make_env(f"jsonl:{path}", reward=f"{rewards}:score", eval_share=0)
    first, second = prompts(environment, "train")
    assert environment.start(first).step("xx", []).reward == 3.0
    assert environment.start(second).step("xxx", []).reward == 0.0
    assert environment.start(first).step("", []).correct
    assert not environment.start(second).step("xxx", []).correct


def test_scoring_beside_a_reward_function_judges_what_is_correct(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD)
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def score():\n    return 0.5\n")
    environment = make_env(f"jsonl:{path}", reward=f"{rewards}:score", scoring="exact", eval_share=0)
    turns = [environment.start(environment.prompt("train", 0)).step(r, []) for r in ("2", "3")]
    assert [t.reward for t in turns] == [0.5, 0.5]
    assert [t.correct for t in turns] == [True, False]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scorring": "exact"}, "did you mean scoring"),
        ({"scoring": "fuzzy"}, "math_verify"),
        ({"eval_share": 1.0}, "eval_share"),
        ({"tolerance": 0.1}, "tolerance is for"),
        ({"eval_path": "x", "eval_share": 0.2}, "exclude each other"),
        ({"prompt_field": "answer"}, "the same"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    path = write(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(ConfigError, match=match):
        make_env(f"jsonl:{path}", **options)
