"""``reasoning_gym:<dataset>``: the procedural data sets of the package reasoning-gym (extra ``tasks``).

A question is generated from a seed and an index. Train and eval use disjoint ranges of seeds, and since small data sets
repeat questions under any seed, a question also belongs to one split by hash of its text; others are skipped.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from halfbyte.config import Section, close_names, validated
from halfbyte.envs.answers import final_answer
from halfbyte.envs.environment import Prompt, Split
from halfbyte.envs.rewards import RewardFunction, with_reward
from halfbyte.envs.scoring import Score
from halfbyte.envs.single_turn import SingleTurnEnvironment
from halfbyte.envs.split import Draws, prompt_key, split_of
from halfbyte.errors import ConfigError, DataError, MissingExtraError

__all__ = ["ReasoningGymEnvironment", "ReasoningOptions"]

#: Questions depend on the hash seed of the Python process (measured with reasoning-gym 0.1.25): they iterate over sets.
HASH_SEEDED = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)

_SLOTS, _TRIES, _BLOCKS = 64, 16, 2**21
_BLOCK = _SLOTS * _TRIES  # seeds used by one data set object; _BLOCKS of them fill the 2**31 seeds of a split
_DETOURS = 16  # further blocks tried for an index before giving up
_KEPT_DATASETS, _KEPT_PROMPTS = 8, 4096


class ReasoningOptions(Section):
    """Options beside those of the data set.

    Arguments:
        seed, eval_seed: of the train and of the held-out questions.
        eval_share: part of all questions that is held out.
        template: the prompt; ``{question}`` stands for the question.
        chat: send a chat message instead of plain text, for models with a chat template.
        system: system message, with ``chat``.
        correct_at: a score from here on counts as correct.
    """

    seed: int = 0
    eval_seed: int = 0
    eval_share: Annotated[float, Field(gt=0, lt=1)] = 0.25
    template: str = "{question}"
    chat: bool = False
    system: str | None = None
    correct_at: float = 1.0


class ReasoningGymEnvironment(SingleTurnEnvironment):
    """One data set, endless.

    Prompts carry ``metadata["entry"]``, the item as reasoning-gym made it, which its scoring reads.

    Arguments:
        dataset: its name in reasoning-gym.
        reward: replaces the reward; ``correct`` stays the data set's own score.
        options: fields of :class:`ReasoningOptions`; all others go to the data set's configuration.

    Raises:
        MissingExtraError: the package is not installed.
        ConfigError: an unknown data set or option (close names are listed), or one that the data set refuses.
    """

    def __init__(self, dataset: str, /, *, reward: RewardFunction | None = None, **options: Any) -> None:
        name = f"reasoning_gym:{dataset}"
        self._factory = _package()
        registered: Mapping[str, Any] = self._factory.DATASETS
        if dataset not in registered:
            close = close_names(dataset, registered)
            raise ConfigError(
                f"reasoning-gym has no data set {dataset!r}",
                where="env.name",
                expected=f"one of: {', '.join(close or sorted(registered))}",
                fix=f"did you mean reasoning_gym:{close[0]}?" if close else "",
            )
        own = {key: value for key, value in options.items() if key in ReasoningOptions.model_fields}
        self.options = validated(ReasoningOptions, own, f"options of {name}")
        if "{question}" not in self.options.template:
            raise ConfigError(
                "template lacks {question}", where=f"options of {name}", expected="text around {question}"
            )
        self._dataset, self._config = dataset, {k: v for k, v in options.items() if k not in own}
        self._check_config(registered[dataset][1], name)
        self._sets: OrderedDict[tuple[Split, int], Any] = OrderedDict()
        self._prompts: OrderedDict[tuple[Split, int], Prompt] = OrderedDict()
        # Made now, so that a configuration is refused here and not in the middle of a run; kept for its scoring.
        self._first = self._block("train", 0)
        super().__init__(name, with_reward(self._own_score, reward))
        if dataset in HASH_SEEDED and os.environ.get("PYTHONHASHSEED", "random") == "random":
            warnings.warn(
                f"questions of {name} differ between processes; set PYTHONHASHSEED=0, or a resumed run sees others",
                stacklevel=2,
            )

    def size(self, split: Split) -> int | None:
        """None: there is no end."""
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        """The ``index``-th question.

        Raises:
            DataError: no question for ``split`` was found: the data set has too few, or fails to generate them.
        """
        if index < 0:
            raise IndexError(f"prompt index {index}")
        key = (split, index)
        if key not in self._prompts:
            self._prompts[key] = self._generate(split, index)
            if len(self._prompts) > _KEPT_PROMPTS:
                self._prompts.popitem(last=False)
        return self._prompts[key]

    def _generate(self, split: Split, index: int) -> Prompt:
        failure: Exception | None = None
        block, slot = divmod(index, _SLOTS)
        for detour in range(_DETOURS):
            dataset = self._block(split, block + detour * 100_003)
            for attempt in range(_TRIES):
                try:
                    entry = dataset[attempt * _SLOTS + slot]
                except Exception as error:  # some items of some data sets cannot be generated
                    failure = error
                    continue
                prompt = self._prompt(f"{self.name}/{split}/{self._seed(split)}/{index}", entry)
                question = Prompt(prompt.id, text=str(entry["question"]))
                if split_of(prompt_key(question), self.options.eval_share) == split:
                    return prompt
        raise DataError(
            f"no {split} question among {_TRIES * _DETOURS} candidates",
            where=f"{self.name}, index {index}",
            expected="a data set with enough different questions for both splits",
            fix="widen its options, or move eval_share towards 0.5",
        ) from failure

    def _prompt(self, id: str, entry: Mapping[str, Any]) -> Prompt:
        text = self.options.template.replace("{question}", str(entry["question"]))
        metadata = {"dataset": self._dataset, "entry": entry}
        if not self.options.chat:
            return Prompt(id, text=text, answer=entry["answer"], metadata=metadata)
        system = [] if self.options.system is None else [{"role": "system", "content": self.options.system}]
        messages = (*system, {"role": "user", "content": text})
        return Prompt(id, messages=messages, answer=entry["answer"], metadata=metadata)

    def _seed(self, split: Split) -> int:
        return self.options.eval_seed if split == "eval" else self.options.seed

    def _block(self, split: Split, block: int) -> Any:
        """The data set with the seeds of ``block``: item i uses seed + i. Small blocks, as some are made in advance."""
        first = Draws("reasoning_gym", self._seed(split)).below(_BLOCKS)
        seed = (first + block) % _BLOCKS * _BLOCK + (2**31 if split == "eval" else 0)
        key = (split, seed)
        if key not in self._sets:
            self._sets[key] = self._create(seed)
            if len(self._sets) > _KEPT_DATASETS:
                self._sets.popitem(last=False)
        self._sets.move_to_end(key)
        return self._sets[key]

    def _create(self, seed: int) -> Any:
        config = dict(self._config)
        if self._dataset == "composite":
            config["datasets"] = self._members(config.get("datasets"))
        try:
            return self._factory.create_dataset(self._dataset, seed=seed, size=_BLOCK, **config)
        except Exception as error:
            raise ConfigError(
                f"reasoning-gym refuses the options: {type(error).__name__}: {error}",
                where=f"options of reasoning_gym:{self._dataset}",
                expected=f"a valid configuration; given {self._config or 'none'}",
            ) from error

    def _members(self, datasets: Any) -> list[Any]:
        spec = importlib.import_module("reasoning_gym.composite").DatasetSpec
        try:
            return [spec(**{"weight": 1.0, "config": {}, **member}) for member in datasets or ()]
        except TypeError as error:
            raise ConfigError(
                f"datasets of reasoning_gym:composite: {error}",
                where="env.options",
                expected="a list of tables with name, weight and config",
            ) from error

    def _check_config(self, config_class: Any, name: str) -> None:
        known = [f.name for f in dataclasses.fields(config_class) if f.name not in ("seed", "size")]
        known += list(ReasoningOptions.model_fields)
        for key in self._config:
            if key == "size":
                raise ConfigError("size is not an option: the stream has no end", where=f"options of {name}")
            if key not in known:
                close = close_names(key, known)
                raise ConfigError(
                    f"unknown option {key!r}",
                    where=f"options of {name}",
                    expected=f"one of: {', '.join(sorted(known))}",
                    fix=f"did you mean {' or '.join(close)}?" if close else "",
                )

    def _own_score(self, prompt: Prompt, response: str) -> Score:
        reward = self._first.score_answer(final_answer(response), prompt.metadata["entry"])
        return Score(reward, reward >= self.options.correct_at)


def _package() -> Any:
    try:
        importlib.import_module("reasoning_gym")  # fills the registry
        return importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        raise MissingExtraError(
            f"reasoning_gym tasks need the package reasoning-gym: {error}",
            where="env.name",
            expected="reasoning-gym installed",
            fix="pip install 'halfbyte[tasks]'",
        ) from error
