"""Who decodes: our engine at one precision, or transformers' ``generate`` in BF16, behind one method.

Both are timed from the moment every sequence has its first new token, so the prompt is not part of the number.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from halfbyte.errors import MissingExtraError
from halfbyte.models.architecture import Architecture
from halfbyte.models.precision import Precision
from halfbyte.models.trajectory import SamplingParams, Trajectory
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request

__all__ = ["Decoded", "Decoder", "EngineDecoder", "TransformersDecoder"]


@dataclass(frozen=True)
class Decoded:
    """New tokens of every sequence, and seconds for all of them but the first of each."""

    tokens: tuple[tuple[int, ...], ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens decoded a second, all sequences together."""
        return sum(len(t) - 1 for t in self.tokens) / self.seconds


class Decoder(Protocol):
    """Decodes greedily and without end-of-sequence: exactly ``new_tokens`` a prompt, at least two."""

    @property
    def name(self) -> str:
        """For the table."""
        ...

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decoded:
        """Continue prompts of one length."""
        ...


class EngineDecoder:
    """Our engine at ``precision``."""

    def __init__(
        self, arch: Architecture, precision: Precision, tensors: Mapping[str, Tensor], *, batch: int, length: int
    ) -> None:
        options = EngineOptions(max_sequences=batch, max_length=length, max_batch_tokens=max(4096, batch * length))
        self.engine = Engine(arch, precision, tensors, options=options)
        self.name = f"halfbyte {precision.name}"

    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decoded:
        """See :class:`Decoder`."""
        engine = self.engine
        found: dict[int, Trajectory] = {}
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        for prompt in prompts:
            engine.add(Request(tuple(prompt), sampling))
        target = engine.tokens_generated + len(prompts)
        while engine.tokens_generated < target:
            found.update(engine.step())
        assert engine.tokens_generated == target  # all prompts fit one pass, so nobody is ahead
        begin = time.perf_counter()
        while engine.busy:
            found.update(engine.step())
        seconds = time.perf_counter() - begin
        return Decoded(tuple(tuple(found[o].response_ids.tolist()) for o in sorted(found)), seconds)


class TransformersDecoder:
    """transformers' ``generate`` on a model folder, BF16 weights and its own defaults otherwise.

    Raises:
        MissingExtraError: transformers is not installed.
    """

    name = "transformers bf16"

    def __init__(self, folder: Path) -> None:
        try:
            import transformers
        except ImportError as error:
            raise MissingExtraError(
                "transformers is not installed", where="the baseline", fix="pip install 'halfbyte[transformers]'"
            ) from error
        self.version = transformers.__version__
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        self.model: Any = model

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decoded:
        """See :class:`Decoder`. The clock starts when the first logits are there, a moment before the first token."""
        ids = torch.tensor([list(p) for p in prompts])
        first: list[float] = []

        def look(ids: Tensor, logits: Tensor) -> Tensor:
            if not first:
                first.append(time.perf_counter())
            return logits

        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            logits_processor=[look],
        )
        seconds = time.perf_counter() - first[0]
        return Decoded(tuple(tuple(row) for row in out[:, ids.shape[1] :].tolist()), seconds)
