"""Input scales: the largest input of every quantised product, seen while the engine reads text in BF16.

Readers of NVFP4 W4A4 checkpoints quantise inputs by blocks of 16 under one global scale a module, which has to be in the file.
(Our own engine takes it from each token and needs none.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from halfbyte.errors import DataError
from halfbyte.formats import fill_uncalibrated, get_spec
from halfbyte.kernels import Kernels, PackedExperts, PackedLinear, active
from halfbyte.models.architecture import Architecture, expert_names
from halfbyte.models.checkpoint import Checkpoint
from halfbyte.models.precision import precision_from
from halfbyte.models.tokenizer import Tokenizer
from halfbyte.models.trajectory import SamplingParams
from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.generate import read_prompts
from halfbyte.rollout.request import Request, request_key

__all__ = ["CONSTANT", "filled", "input_amax", "read_calibration"]

#: The multiplier without calibration: inputs up to 336 fit, blocks whose largest value is below .012 lose scale bits.
CONSTANT = 0.125
_TOP = 2688.0


def read_calibration(path: Path, tokenizer: Tokenizer, arch: Architecture) -> list[tuple[int, ...]]:
    """Token ids of the ``prompt`` or ``messages`` of every line, cut to what the model has positions for.

    Raises:
        DataError: no lines, or one that cannot be used, by number.
    """
    found = []
    for number, row in read_prompts(path):
        if isinstance(row.get("messages"), list):
            ids = tokenizer.encode_chat(row["messages"])
        else:
            ids = tokenizer.encode(row["prompt"], add_special_tokens=True)
        if not ids:
            raise DataError("the text encodes to no token", where=f"{path}:{number}", expected="at least one token")
        found.append(tuple(ids)[: arch.max_positions - 1])
    if not found:
        raise DataError("there is no calibration text", where=str(path), expected="at least one line")
    return found


@torch.no_grad()
def input_amax(checkpoint: Checkpoint, sequences: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """Module -> largest absolute input while the model reads ``sequences`` in BF16; 0 for experts that no token reached."""
    arch = checkpoint.architecture
    watch = _Watch(active(), arch)
    engine = Engine(
        arch,
        precision_from("bf16"),
        checkpoint.tensors,
        kernels=cast(Kernels, watch),
        options=EngineOptions(max_length=max(map(len, sequences)) + 1, kv_memory_mb=1024, prefix_cache=False),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    requests = (
        Request(ids, sampling, key=request_key("calibrate", str(i)), group=i) for i, ids in enumerate(sequences)
    )
    engine.generate(requests)
    return dict(watch.amax)


def filled(amax: Mapping[str, float], arch: Architecture, modules: Iterable[str]) -> tuple[dict[str, float], list[str]]:
    """Multipliers of the inputs of ``modules``, and the modules whose scale was filled in.

    An expert that no calibration token reached gets the widest scale of its layer, and the log says so (compressed-tensors
    #595, vLLM #45212).

    Raises:
        NumericsError: no expert of a layer was reached.
    """
    spec = get_spec("modelopt")  # a multiplier, amax / 2688
    wanted = set(modules)
    out = {name: (amax.get(name, 0.0) or 0.0) / _TOP for name in wanted}
    gone: list[str] = []
    for layer in arch.moe_layers:
        for part in range(3):
            names = [expert_names(arch, layer, e)[part].removesuffix(".weight") for e in range(arch.n_experts)]
            if not wanted.issuperset(names):
                continue
            where = f"layer {layer}, {names[0].rsplit('.', 1)[1]}"
            scales, indices = fill_uncalibrated(torch.tensor([out[n] for n in names]), spec, name=where)
            out |= dict(zip(names, scales.tolist()))
            gone += [names[i] for i in indices]
    for name, scale in out.items():  # a dense product whose inputs were all zero
        out[name] = scale or CONSTANT
    return out, gone


class _Watch:
    """The kernels, noting the largest input of every product; everything else is passed on."""

    def __init__(self, kernels: Kernels, arch: Architecture) -> None:
        self._kernels, self._arch = kernels, arch
        self.amax: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def linear(
        self,
        x: Tensor,
        w: PackedLinear,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`Kernels.linear`."""
        if len(x):
            seen = x if norm is None else self._kernels.rms_norm(x, norm, eps)
            self._note(w.name.split("+"), seen)
        return self._kernels.linear(x, w, norm=norm, eps=eps, gated=gated, residual=residual)

    def experts(self, x: Tensor, expert_ids: Tensor, gates: Tensor, w: PackedExperts) -> Tensor:
        """See :meth:`Kernels.experts`."""
        layer = int(w.name.split(".")[2])
        gate_up = w.gate_up.dequantised()
        for e in range(w.n_experts):
            rows = x[(expert_ids == e).any(dim=1)]
            gate, up, down = (name.removesuffix(".weight") for name in expert_names(self._arch, layer, e))
            if len(rows):
                self._note((gate, up), rows)
                self._note((down,), self._kernels.swiglu(rows.bfloat16().float() @ gate_up[e].T))
        return self._kernels.experts(x, expert_ids, gates, w)

    def _note(self, names: Iterable[str], x: Tensor) -> None:
        largest = float(x.abs().amax())
        for name in names:
            self.amax[name] = max(self.amax[name], largest)
