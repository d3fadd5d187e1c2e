"""The procedural data sets of reasoning-gym."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest

from halfbyte.envs import Split, make_env, prompt_key, split_of, stream
from halfbyte.errors import ConfigError, DataError, MissingExtraError

reasoning_gym = pytest.importorskip("reasoning_gym")


def texts(environment: Any, split: Split, n: int) -> list[str]:
    return [str(p.text) for p in itertools.islice(stream(environment, split), n)]


@pytest.mark.parametrize("dataset", ["chain_sum", "leg_counting", "spell_backward"])
def test_answers_score_as_the_package_scores_them(dataset: str) -> None:
    environment = make_env(f"reasoning_gym:{dataset}")
    package = reasoning_gym.create_dataset(dataset, seed=1, size=10)
    for split in ("train", "eval"):
        for prompt in itertools.islice(stream(environment, split), 5):
            entry = prompt.metadata["entry"]
            assert entry["question"] == prompt.text
            for response in (prompt.answer, f"it is <answer> {prompt.answer} </answer>", "wrong", f"{prompt.answer}?"):
                turn = environment.start(prompt).step(response, [])
                answer = prompt.answer if "<answer>" in response else response
                assert turn.reward == package.score_answer(answer, entry)
                assert turn.reward is not None
                assert turn.correct == (turn.reward >= 1.0)
            assert environment.start(prompt).step(prompt.answer, []).correct


def test_options_reach_the_data_set() -> None:
    environment = make_env("reasoning_gym:chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    for prompt in itertools.islice(stream(environment, "train"), 30):
        assert prompt.metadata["entry"]["metadata"]["num_terms"] == 2


def test_splits_are_disjoint_by_text_even_where_questions_repeat() -> None:
    # 2 terms of 1 digit: at most a few hundred questions, each drawn many times under any seed.
    small: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    environment = make_env("reasoning_gym:chain_sum", **small)
    train, held_out = texts(environment, "train", 1500), texts(environment, "eval", 500)
    assert len(set(train)) < 500  # they do repeat
    assert len(set(held_out)) > 10
    assert not set(train) & set(held_out)
    for split, members in (("train", train), ("eval", held_out)):
        assert all(split_of(text, 0.25) == split for text in members)


def test_splits_use_disjoint_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = sys.modules["reasoning_gym.factory"]
    seeds: dict[str, list[range]] = {"train": [], "eval": []}
    create = factory.create_dataset

    def spy(name: str, *, seed: int, size: int, **config: Any) -> Any:
        seeds["eval" if seed >= 2**31 else "train"].append(range(seed, seed + size))
        return create(name, seed=seed, size=size, **config)

    monkeypatch.setattr(factory, "create_dataset", spy)
    for seed in (0, 1, 2):
        environment = make_env("reasoning_gym:leg_counting", seed=seed, eval_seed=seed)
        for index in (0, 63, 64, 2**40, 2**40 + 10**6):
            for split in ("train", "eval"):
                seeds_before = {k: len(v) for k, v in seeds.items()}
                environment.prompt(split, index)
                other = "train" if split == "eval" else "eval"
                assert len(seeds[other]) == seeds_before[other]
    assert all(block.stop <= 2**31 for block in seeds["train"])
    assert all(block.start >= 2**31 and block.stop <= 2**32 for block in seeds["eval"])
    starts = {block.start for block in seeds["train"]}
    assert all(start % 1024 == 0 for start in starts)  # blocks never overlap in part


def test_a_prompt_is_a_function_of_its_index() -> None:
    first, second = make_env("reasoning_gym:leg_counting"), make_env("reasoning_gym:leg_counting")
    backwards = [second.prompt("train", i) for i in reversed(range(200))]
    assert [first.prompt("train", i) for i in range(200)] == backwards[::-1]
    assert first.prompt("train", 5) is first.prompt("train", 5)  # kept, as generating may be slow


def test_seeds() -> None:
    a, b = make_env("reasoning_gym:chain_sum"), make_env("reasoning_gym:chain_sum", seed=1)
    assert texts(a, "train", 10) != texts(b, "train", 10)
    assert texts(a, "eval", 10) == texts(b, "eval", 10)


def test_chat_and_template() -> None:
    plain = make_env("reasoning_gym:chain_sum")
    chat = make_env("reasoning_gym:chain_sum", chat=True, system="Be brief.", template="Q: {question}\nA:")
    question = plain.prompt("eval", 0).text
    assert chat.prompt("eval", 0).messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"Q: {question}\nA:"},
    )
    templated = make_env("reasoning_gym:chain_sum", template="Q: {question}\nA:")
    # The split is that of the question: a template moves nothing between train and eval.
    assert [p.removeprefix("Q: ").removesuffix("\nA:") for p in texts(templated, "train", 20)] == texts(
        plain, "train", 20
    )
    assert prompt_key(templated.prompt("train", 0)) != prompt_key(plain.prompt("train", 0))


def test_mixtures() -> None:
    members = [{"name": "chain_sum"}, {"name": "leg_counting", "weight": 2.0, "config": {"max_animals": 3}}]
    environment = make_env("reasoning_gym:composite", datasets=members)
    sources = set()
    for prompt in itertools.islice(stream(environment, "train"), 40):
        sources.add(prompt.metadata["entry"]["metadata"]["source_dataset"])
        assert environment.start(prompt).step(prompt.answer, []).correct
    assert sources == {"chain_sum", "leg_counting"}


def test_correct_at() -> None:
    prompt = make_env("reasoning_gym:chain_sum").prompt("train", 0)
    response = f"{prompt.answer} or so"
    strict, lenient = make_env("reasoning_gym:chain_sum"), make_env("reasoning_gym:chain_sum", correct_at=0.1)
    turns = [e.start(prompt).step(response, []) for e in (strict, lenient)]
    assert 0.1 < (turns[0].reward or 0.0) < 1.0  # the package gives partial credit
    assert [t.correct for t in turns] == [False, True]


@pytest.mark.parametrize(
    ("dataset", "options", "match"),
    [
        ("chainsum", {}, "did you mean reasoning_gym:chain_sum"),
        ("zzzzzz", {}, "chain_sum"),
        ("chain_sum", {"min_term": 3}, "did you mean min_terms"),
        ("chain_sum", {"min_terms": -3}, "min_terms must be positive"),
        ("chain_sum", {"size": 10}, "size is not an option"),
        ("chain_sum", {"eval_share": 0}, "eval_share"),
        ("chain_sum", {"template": "no place"}, "template"),
        ("composite", {}, "at least one dataset"),
        ("composite", {"datasets": [{"nam": "chain_sum"}]}, "nam"),
        ("composite", {"datasets": [{"name": "chain_summ"}]}, "chain_summ"),
    ],
)
def test_wrong_names_and_options(dataset: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_env(f"reasoning_gym:{dataset}", **options)


def test_a_data_set_too_small_for_two_splits_says_so() -> None:
    environment = make_env("reasoning_gym:leg_counting", eval_share=1e-9)
    with pytest.raises(DataError, match="no eval question among 256"):
        environment.prompt("eval", 0)


def test_items_that_cannot_be_generated_are_passed_over() -> None:
    environment: Any = make_env("reasoning_gym:leg_counting")

    class Flaky:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getitem__(self, index: int) -> Any:
            if index % 3 == 0:
                raise RuntimeError("no solution found")
            return self.inner[index]

    create = environment._create
    environment._create = lambda seed: Flaky(create(seed))
    environment._sets.clear()
    assert len(texts(environment, "train", 100)) == 100
    environment._create = lambda seed: []
    environment._sets.clear()
    with pytest.raises(DataError) as caught:
        environment.prompt("train", 500)
    assert isinstance(caught.value.__cause__, IndexError)


def test_questions_that_depend_on_the_hash_seed_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.warns(UserWarning, match="PYTHONHASHSEED"):
        make_env("reasoning_gym:ransom_note")


def test_the_stream_is_the_same_in_another_process() -> None:
    code = (
        "import itertools; from halfbyte.envs import make_env, stream\n"
        "env = make_env('reasoning_gym:chain_sum')\n"
        "print([p.text for p in itertools.islice(stream(env, 'train'), 8)])"
    )
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "12345"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{texts(make_env('reasoning_gym:chain_sum'), 'train', 8)}\n"


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'halfbyte\[tasks\]'"):
        make_env("reasoning_gym:chain_sum")
