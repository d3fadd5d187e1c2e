"""From a model path to an engine that can serve it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from halfbyte.errors import CheckpointError, ConfigError
from halfbyte.models.chat_template import ChatTemplate
from halfbyte.models.checkpoint import Checkpoint
from halfbyte.models.open_model import open_model
from halfbyte.models.precision import precision_from, with_weight_spec
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.serve.settings import ServeSettings

__all__ = ["Opened", "open_served"]


@dataclass(frozen=True)
class Opened:
    """A model that is ready to serve."""

    engine: Engine
    tokenizer: Tokenizer
    checkpoint: Checkpoint

    @property
    def facts(self) -> Mapping[str, str]:
        """What is served, in words."""
        engine = self.engine
        return {
            "precision": engine.precision.name,
            "weights": "fp4" if self.checkpoint.quantisation is not None else "plain",
            "kv": engine.precision.kv,
            "kernels": engine.kernels.name,
        }


def open_served(settings: ServeSettings) -> Opened:
    """The checkpoint, its tokenizer, and an engine over them. Codes of an FP4 checkpoint are packed as they are.

    Raises:
        UserError: the model, the precision or a budget cannot be used.
    """
    checkpoint, tokenizer = open_model(settings.model)
    if settings.chat_template is not None:
        tokenizer.chat_templates = {"default": _template(settings.chat_template)}
    precision = precision_from(settings.precision)
    if checkpoint.quantisation is not None:
        precision = with_weight_spec(precision, checkpoint.quantisation.spec)
    arch = checkpoint.architecture
    if settings.max_length is not None and settings.max_length > arch.max_positions:
        raise ConfigError(
            f"--max-length is {settings.max_length}",
            where=settings.model,
            expected=f"at most the model's {arch.max_positions} positions",
        )
    engine = Engine(
        arch,
        precision,
        checkpoint.tensors,
        detokeniser=tokenizer,
        options=EngineOptions(
            max_batch_tokens=settings.max_batch_tokens,
            max_sequences=settings.max_sequences,
            kv_memory_mb=settings.kv_memory_mb,
            max_length=settings.max_length,
            prefix_cache=settings.prefix_cache,
        ),
        codes=checkpoint.codes,
    )
    return Opened(engine, tokenizer, checkpoint)


def _template(path: Path) -> ChatTemplate:
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"the chat template cannot be read: {error}", where=str(path), expected="text in UTF-8"
        ) from error
