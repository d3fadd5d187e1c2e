"""FP32 master weights, what is published of them, and what the learner's forward pass multiplies by.

The published weights are the masters' cast to BF16 (or the masters themselves, for the exact control). The *effective*
weights are the published ones after the rollout's own quantiser, for every kind a site runs in. Because rounding is
straight-through, the gradient of an effective weight is the gradient of its master: effective weights are the leaves of
the graph and no gradient is copied through the quantiser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from halfbyte.errors import NumericsError
from halfbyte.kernels import Kernels
from halfbyte.models.architecture import Architecture, site_of
from halfbyte.models.layout import checkpoint_views, from_checkpoint
from halfbyte.models.precision import Kind, Precision

__all__ = ["Parameters"]


class Parameters:
    """Masters and effective weights.

    Arguments:
        tensors: a checkpoint's tensors, checkpoint names.
        precision: what the learner's forward pass runs in.
        publish_dtype: torch.bfloat16, or torch.float32 for the exact control.

    Attributes:
        masters: parameter name (experts stacked) -> float32 tensor.
    """

    def __init__(
        self,
        arch: Architecture,
        tensors: Mapping[str, Tensor],
        precision: Precision,
        kernels: Kernels,
        *,
        publish_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.arch, self.precision, self.kernels, self.publish_dtype = arch, precision, kernels, publish_dtype
        self.masters = from_checkpoint(tensors, arch, dtype=torch.float32)
        self._published: dict[str, Tensor] = {}
        self._effective: dict[tuple[str, Kind], Tensor] = {}
        for name in self.masters:
            for kind in self._kinds(name):
                self._effective[name, kind] = torch.empty_like(self.masters[name]).requires_grad_()
        self.refresh()

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
                for kind in self._kinds(name):
                    self._effective[name, kind].copy_(self._rounded(name, kind, new.float()))
        return changed

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor in the publish dtype) of every tensor, as the rollout receives them."""
        return checkpoint_views(self._published, self.arch)

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
            return torch.stack(
                [self.kernels.fake_quantise(w, spec, name=f"{name}[{i}]") for i, w in enumerate(published)]
            )
        return self.kernels.fake_quantise(published.contiguous(), spec, name=name)
