"""Open a policy by what a user writes: a model folder, or ``tiny`` for the one in the package."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

from halfbyte.errors import CheckpointError
from halfbyte.models.checkpoint import Checkpoint, load_checkpoint
from halfbyte.models.tokenizer import Tokenizer, check_tokenizer

__all__ = ["model_folder", "open_model"]


def model_folder(path: str) -> Path:
    """The folder of a model path; ``tiny`` is the policy in the package."""
    if path == "tiny":
        return Path(str(resources.files("halfbyte.models").joinpath("tiny")))
    return Path(path)


def open_model(path: str) -> tuple[Checkpoint, Tokenizer]:
    """A checked checkpoint and its tokenizer; every EOS id that the folder names is in the architecture.

    Raises:
        CheckpointError: the folder cannot be used, or has no tokenizer, or one of another model.
        NumericsError: a weight is not finite.
    """
    checkpoint = load_checkpoint(model_folder(path))
    if checkpoint.tokenizer_path is None:
        raise CheckpointError("the model has no tokenizer", where=path, expected="tokenizer.json in the model folder")
    tokenizer = Tokenizer.from_folder(checkpoint.tokenizer_path)
    check_tokenizer(tokenizer, checkpoint.architecture)
    eos = tuple(dict.fromkeys((*checkpoint.eos_ids, *tokenizer.eos_ids)))
    return replace(checkpoint, architecture=replace(checkpoint.architecture, eos_ids=eos)), tokenizer
