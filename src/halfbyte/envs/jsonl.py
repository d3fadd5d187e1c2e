"""``jsonl:<path>``: your own prompts and answers.

One JSON object a line: ``{"prompt": "What is 2+3?", "answer": "5"}``; a prompt may also be a list of chat messages.
Other fields go to the reward function. Held-out prompts come from a file of their own (``eval_path``) or are a share of
this one, by hash. A prompt on both sides is an error (optimum-intel #1547: calibrated on the evaluation set).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from halfbyte.config import Section, validated
from halfbyte.envs.answers import answer_problem, make_scorer
from halfbyte.envs.environment import Prompt, Split
from halfbyte.envs.rewards import RewardFunction, with_reward
from halfbyte.envs.rows import Row, read_rows
from halfbyte.envs.single_turn import SingleTurnEnvironment
from halfbyte.envs.split import prompt_key, split_of
from halfbyte.errors import DataError

__all__ = ["JsonlEnvironment", "JsonlOptions"]

_SHOWN = 3


class JsonlOptions(Section):
    """Options.

    Arguments:
        scoring: how a response is compared with the answer, see ``answers.py``. None: exact, or, where a reward
            function is given, only that function (and answers may be anything, or missing).
        tolerance: for numeric scoring: relative error allowed.
        eval_path: held-out prompts. Without it
        eval_share: is the part of the prompts held out, by hash; 0 for none (evaluation is then impossible).
        prompt_field, answer_field: names of the fields.
    """

    scoring: Literal["exact", "numeric", "contains", "math_verify"] | None = None
    tolerance: Annotated[float, Field(ge=0)] = 0.0
    eval_path: str | None = None
    eval_share: Annotated[float, Field(ge=0, lt=1)] = 0.1
    prompt_field: Annotated[str, Field(min_length=1)] = "prompt"
    answer_field: Annotated[str, Field(min_length=1)] = "answer"

    @model_validator(mode="after")
    def _consistent(self) -> JsonlOptions:
        if self.tolerance and self.scoring != "numeric":
            raise ValueError("tolerance is for scoring = numeric")
        if self.eval_path is not None and "eval_share" in self.model_fields_set:
            raise ValueError("eval_path and eval_share exclude each other")
        if self.prompt_field == self.answer_field:
            raise ValueError("prompt_field and answer_field are the same")
        return self


class JsonlEnvironment(SingleTurnEnvironment):
    """Prompts of a file, in its order; the loop shuffles.

    Arguments:
        path: the file; relative to the working directory.
        reward: replaces the reward; ``correct`` is the scoring's if ``scoring`` is given, else the reward's.
        options: fields of :class:`JsonlOptions`.

    Raises:
        ConfigError: an unknown option or a wrong value.
        DataError: a file or lines that cannot be used, no prompts, none held out, or one prompt on both sides.
        MissingExtraError: math_verify scoring without the package.
    """

    def __init__(self, path: str, /, *, reward: RewardFunction | None = None, **options: Any) -> None:
        name = f"jsonl:{path}"
        self.options = validated(JsonlOptions, options, f"options of {name}")
        scoring = self.options.scoring
        if reward is not None and scoring is None:
            super().__init__(name, reward.scorer(None))
        else:
            scoring = scoring or "exact"
            super().__init__(name, with_reward(make_scorer(scoring, tolerance=self.options.tolerance), reward))

        def problem(answer: Any) -> str | None:
            return None if scoring is None else answer_problem(scoring, answer)

        def read(file: str, id_prefix: str = "") -> list[Row]:
            return read_rows(
                Path(file),
                prompt_field=self.options.prompt_field,
                answer_field=self.options.answer_field,
                answer_problem=problem,
                id_prefix=id_prefix,
            )

        rows = read(path)
        if self.options.eval_path is not None:
            train, held_out = rows, read(self.options.eval_path, "eval/")
            _refuse_overlap(train, held_out)
        else:
            train, held_out = _divide(rows, self.options.eval_share, path)
        self._prompts: dict[Split, tuple[Prompt, ...]] = {
            "train": tuple(row.prompt for row in train),
            "eval": tuple(row.prompt for row in held_out),
        }

    def size(self, split: Split) -> int | None:
        """Number of prompts."""
        return len(self._prompts[split])

    def prompt(self, split: Split, index: int) -> Prompt:
        """The ``index``-th prompt of the split in file order."""
        if not 0 <= index < len(self._prompts[split]):
            raise IndexError(f"prompt index {index} of {len(self._prompts[split])} ({split})")
        return self._prompts[split][index]


def _divide(rows: list[Row], share: float, path: str) -> tuple[list[Row], list[Row]]:
    train: list[Row] = []
    held_out: list[Row] = []
    for row in rows:
        (train if split_of(prompt_key(row.prompt), share) == "train" else held_out).append(row)
    if not train or (share > 0 and not held_out):
        raise DataError(
            f"all {len(rows)} prompts fall into one split",
            where=path,
            expected=f"prompts in train and in eval at eval_share = {share:g}",
            fix="give more prompts, another eval_share, or the held-out ones in a file of their own (eval_path)",
        )
    return train, held_out


def _refuse_overlap(train: list[Row], held_out: list[Row]) -> None:
    places = {prompt_key(row.prompt): row.where for row in reversed(train)}
    both = [(row.where, places[key]) for row in held_out if (key := prompt_key(row.prompt)) in places]
    if both:
        shown = "; ".join(f"{a} is also {b}" for a, b in both[:_SHOWN])
        more = f" and {len(both) - _SHOWN} more" if len(both) > _SHOWN else ""
        raise DataError(
            f"{len(both)} held-out prompts are also training prompts",
            where=shown + more,
            expected="disjoint files: accuracy on trained prompts says nothing",
            fix="remove them from one of the files",
        )
