"""Which segments a diagnosis uses, from what the user says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from halfbyte.errors import ConfigError
from halfbyte.models.open_model import model_folder
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.objective import Segmenter, make_segmenter
from halfbyte.objective.segments import delimiter_flags

__all__ = ["DelimiterRule", "segmentation"]

DelimiterRule: TypeAlias = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]
"""From token ids [T] to [T] bool: which of them end a line or a sentence."""


def segmentation(name: str | None, tokenizer: str | None) -> tuple[Segmenter, DelimiterRule | None]:
    """The segmenter and, where it is needed, the rule that finds delimiters.

    Arguments:
        name: of a segmenter; None: ``change_point``, as in training.
        tokenizer: a model folder, or ``tiny``; ids mean nothing without one.

    Raises:
        ConfigError: unknown name, or ``delimiter`` without a tokenizer.
        CheckpointError: the folder has no tokenizer that can be read.
    """
    name = name or "change_point"
    segmenter = make_segmenter(name)
    if name != "delimiter":
        return segmenter, None
    if tokenizer is None:
        raise ConfigError(
            "delimiters are texts, and the file has only token ids",
            where="--segments delimiter",
            fix="name the model with --tokenizer FOLDER, or use --segments fixed",
        )
    opened = Tokenizer.from_folder(model_folder(tokenizer))

    def ends(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        known, place = np.unique(ids, return_inverse=True)
        texts = [opened.decode([int(i)], skip_special_tokens=False) for i in known]
        flags: npt.NDArray[np.bool_] = delimiter_flags(texts).numpy()[place]
        return flags

    return segmenter, ends
