"""FP32 master weights, what is published of them, and what the learner's forward pass multiplies by.

The published weights are the masters' cast to BF16 (or the masters themselves, for the exact control). The *effective*
weights are the published ones after the rollout's own quantiser, for every kind a site runs in. Because rounding is
straight-through, the gradient of an effective weight is the gradient of its master: effective weights are the leaves of
the graph and no gradient is copied through the quantiser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from halfbyte.errors import NumericsError
from halfbyte.formats import QuantSpec, StableScales
from halfbyte.kernels import Kernels
from halfbyte.models.architecture import Architecture, expert_names, site_of
from halfbyte.models.layout import checkpoint_views, from_checkpoint
from halfbyte.models.precision import Kind, Precision

__all__ = ["Parameters"]

Out = TypeVar("Out")


class Parameters:
    """Masters and effective weights.

    Arguments:
        tensors: a checkpoint's tensors, checkpoint names.
        precision: what the learner's forward pass runs in.
        publish_dtype: torch.bfloat16, or torch.float32 for the exact control.
        rollout_precision: what the rollout runs in, where it is not ``precision``.
        device: where masters and effective weights live; what is published is handed out on the CPU.

    Attributes:
        masters: parameter name (experts stacked) -> float32 tensor.
        scales: global scales that outlive versions, shared with the rollout; None where it recomputes them.
    """

    def __init__(
        self,
        arch: Architecture,
        tensors: Mapping[str, Tensor],
        precision: Precision,
        kernels: Kernels,
        *,
        publish_dtype: torch.dtype = torch.bfloat16,
        rollout_precision: Precision | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.arch, self.precision, self.kernels, self.publish_dtype = arch, precision, kernels, publish_dtype
        self._rollout = rollout_precision or precision
        spec = self._rollout.weight_spec
        self.scales = None if spec.global_update == "recompute" else StableScales(spec)
        self.masters = self._taken(tensors)
        self._published: dict[str, Tensor] = {}
        self._effective = self._leaves()
        self.refresh()

    def _taken(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The masters that this process holds."""
        held = from_checkpoint(tensors, self.arch, dtype=torch.float32)
        return {name: tensor.to(self.device) for name, tensor in held.items()}

    def _leaves(self) -> dict[tuple[str, Kind], Tensor]:
        """The effective weights of the masters, not filled yet."""
        return {
            (name, kind): torch.empty_like(master).requires_grad_()
            for name, master in self.masters.items()
            for kind in self._kinds(name)
        }

    def span(self, name: str) -> tuple[int, int]:
        """Rows [begin, end) of a parameter that ``masters`` holds: all of them in one process."""
        return 0, len(self.masters[name])

    def rows(self, name: str) -> int:
        """Rows of a parameter over all ranks."""
        return len(self.masters[name])

    def run(self, function: Callable[[], Out]) -> Out:
        """A whole forward pass; where weights are sharded, those outside of layers are together for as long."""
        return function()

    def layer(self, index: int, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """One layer of it; where weights are sharded, the layer's are together for as long."""
        return function(x)

    def effective(self, name: str, kind: Kind | None = None) -> Tensor:
        """The leaf the forward pass uses for parameter ``name`` in ``kind`` (None: the parameter is not a matrix product)."""
        return self._effective[name, kind or self._kinds(name)[0]]

    def refresh(self) -> bool:
        """Recompute published and effective weights from the masters; call after every optimiser step.

        Returns:
            Whether any published bit changed: an update below the resolution of BF16 publishes nothing new (TRL #5937).

        Raises:
            NumericsError: a master is not finite; the run's last checkpoint is still good.
        """
        changed = False
        with torch.no_grad():
            for name, master in self.masters.items():
                low, high = torch.aminmax(master)
                if not bool(torch.isfinite(low) & torch.isfinite(high)):
                    raise NumericsError(
                        "a master weight is not finite after the update",
                        where=name,
                        fix="lower learner.lr; the last checkpoint is still good",
                    )
                new = master.to(self.publish_dtype, copy=True)
                old = self._published.get(name)
                if old is not None and torch.equal(new, old):
                    continue
                changed = True
                self._published[name] = new
                if self.scales is not None:
                    self.scales.update(self._scale_groups(name, new))
                for kind in self._kinds(name):
                    self._effective[name, kind].copy_(self._rounded(name, kind, new.float()))
        return changed

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor in the publish dtype) of every tensor, as the rollout receives them."""
        return checkpoint_views(self.published_parameters(), self.arch)

    def published_parameters(self) -> dict[str, Tensor]:
        """Parameter name (experts stacked) -> published tensor; the next update replaces it and never writes to it."""
        return {name: tensor.cpu() for name, tensor in self._published.items()}

    def published_scales(self) -> dict[str, Tensor]:
        """``<weight>.global_scale`` -> stored scale, float32 of shape (), of the weights whose scale outlives versions
        (gate and up of an expert share one, under the gate's name)."""
        if self.scales is None:
            return {}
        return {f"{name}.global_scale": scale for name, scale in self.scales.current.items()}

    def restore_scales(self, state: Mapping[str, Tensor]) -> None:
        """Go on with the global scales of a saved run; everything effective is recomputed by the next :meth:`refresh`.

        Raises:
            CheckpointError: a scale that cannot be used.
        """
        if self.scales is not None:
            self.scales.load_state(state)
            self._published.clear()

    def take_gradients(self) -> dict[str, Tensor]:
        """Gradients by parameter name (summed over the kinds of a parameter), and clear them."""
        out: dict[str, Tensor] = {}
        for (name, _), leaf in self._effective.items():
            if leaf.grad is not None:
                out[name] = leaf.grad if name not in out else out[name] + leaf.grad
                leaf.grad = None
        return out

    def _kinds(self, name: str) -> tuple[Kind, ...]:
        """Kinds a parameter is needed in; "fp32" stands for "as published" where no quantiser acts."""
        site = site_of(name)
        head = self.precision.decode.head
        if site == "embed":
            quantised_head = self.arch.tie_embeddings and head in ("w4a16", "w4a4")
            return ("fp32", head) if quantised_head else ("fp32",)
        if site == "norm" or self.masters[name].dim() == 1:
            return ("fp32",)
        return (head,) if site == "head" else self.precision.kinds(site)

    def _scale_groups(self, name: str, published: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """Checkpoint weight -> what shares its global scale, for the weights of a parameter that the rollout quantises."""
        site, block = site_of(name), self._rollout.weight_spec.block
        if site == "embed" and self.arch.tie_embeddings:
            site = "head"
        if site in ("embed", "norm") or published.dim() < 2 or not {"w4a4", "w4a16"} & set(self._rollout.kinds(site)):
            return {}
        if published.dim() == 2:
            return {name: (published,)} if published.shape[1] % block == 0 else {}
        if self.arch.hidden_size % block or self.arch.moe_intermediate_size % block:
            return {}
        return {key: (published[e],) for e, key in enumerate(self._expert_keys(name))}

    def _expert_keys(self, name: str) -> list[str]:
        """The checkpoint weight that names the scale of each expert of a stacked parameter (the gate's, for gate and up)."""
        layer = int(name.split(".")[2])
        which = 0 if name.endswith("gate_up_proj") else 2
        return [expert_names(self.arch, layer, e)[which] for e in range(self.arch.n_experts)]

    def _fake_quantised(self, w: Tensor, spec: QuantSpec, scale_name: str, name: str) -> Tensor:
        """``w`` as the rollout's quantiser makes it, under the scale that the rollout gets."""
        kept = self._kept_scale(spec, scale_name)
        if kept is None:
            return self.kernels.fake_quantise(w, spec, name=name)
        return self.kernels.dequantise(self.kernels.quantise(w, spec, global_scale=kept, name=name), w.dtype)

    def _kept_scale(self, spec: QuantSpec, scale_name: str) -> Tensor | None:
        """The stored global scale that is given, None where the quantiser finds its own."""
        return None if self.scales is None or spec != self.scales.spec else self.scales.current.get(scale_name)

    def _rounded(self, name: str, kind: Kind, published: Tensor) -> Tensor:
        spec = self.precision.weight_spec
        if kind == "fp32":
            return published
        inputs = (
            [published.shape[-1]] if published.dim() == 2 else [self.arch.hidden_size, self.arch.moe_intermediate_size]
        )
        if kind == "bf16" or any(k % spec.block for k in inputs):  # the rollout falls back to BF16 in the same way
            return published.bfloat16().float()
        if published.dim() == 3:  # experts: one global scale an expert
            keys = self._expert_keys(name)[self.span(name)[0] :]
            return torch.stack(
                [self._fake_quantised(w, spec, keys[i], f"{name}[{i}]") for i, w in enumerate(published)]
            )
        return self._fake_quantised(published.contiguous(), spec, name, name)
