"""AdamW on the FP32 masters (Loshchilov & Hutter, arXiv 1711.05101), with global-norm clipping and a savable state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError, NumericsError
from halfbyte.learner.ranks import Alone, Ranks

__all__ = ["Optimiser"]

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimiser:
    """torch's AdamW over named masters. Norms and biases are not decayed.

    Arguments:
        masters: parameter name -> float32 tensor, updated in place; of several ranks each has its own rows.
        clip_norm: gradients are scaled down to this global norm (over all ranks); None clips nothing.
    """

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clip_norm: float | None,
        ranks: Ranks | None = None,
    ) -> None:
        self.masters, self.lr, self.clip_norm, self._ranks = dict(masters), lr, clip_norm, ranks or Alone()
        groups = [
            {"params": [p for p in masters.values() if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in masters.values() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=True)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], rate_factor: float) -> float:
        """Clip, update the masters, and return the gradient norm before clipping.

        Raises:
            NumericsError: the gradient norm is not finite; nothing was changed.
        """
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients.values()]
        norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        if self._ranks.size > 1:
            norm = float(self._ranks.add(torch.tensor([norm * norm], dtype=torch.float64))) ** 0.5
        if norm != norm or norm == float("inf"):
            bad = next((n for n, g in gradients.items() if not bool(torch.isfinite(g).all())), "the norm itself")
            raise NumericsError(
                "the gradient is not finite", where=bad, fix="lower the learning rate or look at the gap"
            )
        scale = 1.0 if self.clip_norm is None or norm <= self.clip_norm else self.clip_norm / norm
        for name, master in self.masters.items():
            gradient = gradients.get(name)
            master.grad = None if gradient is None else gradient if scale == 1.0 else gradient * scale
        for group in self._adam.param_groups:
            group["lr"] = self.lr * rate_factor
        self._adam.step()
        for master in self.masters.values():
            master.grad = None
        return norm

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts by name: ``{name}.exp_avg``, ``{name}.exp_avg_sq``, ``{name}.step``."""
        out: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            held = self._adam.state.get(master)
            if held:
                out |= {f"{name}.{key}": held[key] for key in MOMENTS}
                out[f"{name}.step"] = held["step"].reshape(1).to(torch.float32)
        return out

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state` gave.

        Raises:
            CheckpointError: a moment is missing or has another shape.
        """
        for name, master in self.masters.items():
            if f"{name}.step" not in state:
                continue
            held: dict[str, Tensor] = {"step": state[f"{name}.step"].reshape(()).clone().to(master.device)}
            for key in MOMENTS:
                tensor = state.get(f"{name}.{key}")
                if tensor is None or tensor.shape != master.shape:
                    raise CheckpointError("an optimiser moment is missing or mis-shaped", where=f"{name}.{key}")
                held[key] = tensor.clone().to(master.device)
            self._adam.state[master] = held
