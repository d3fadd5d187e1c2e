"""A torch module as a target: its parameters (and buffers, if asked) under checkpoint names, patched in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from halfbyte.refit.adapters.arrays import ArraysTarget, Hooks
from halfbyte.refit.arrays import Bytes, flat_bytes, writable_bytes
from halfbyte.refit.errors import LayoutError, WrongBaseError
from halfbyte.refit.patch import BlockPatch, Change, Side, Stamp, Update

if TYPE_CHECKING:
    import torch

__all__ = ["ModuleTarget", "module_tensors"]


def module_tensors(
    module: torch.nn.Module, *, buffers: bool = False, rename: Callable[[str], str] = lambda name: name
) -> dict[str, torch.Tensor]:
    """Name -> tensor; a tied parameter appears under its first name only.

    Arguments:
        buffers: persistent buffers as well.
        rename: parameter name -> checkpoint name.
    Raises:
        LayoutError: two parameters get the same name.
    """
    found: dict[str, torch.Tensor] = {}
    items: list[tuple[str, torch.Tensor]] = list(module.named_parameters())
    if buffers:
        persistent = module.state_dict(keep_vars=True)
        items += [(n, b) for n, b in module.named_buffers() if n in persistent]
    for name, tensor in items:
        if rename(name) in found:
            raise LayoutError(f"two parameters are renamed to {rename(name)!r}", where=name)
        found[rename(name)] = tensor.detach()
    return found


class ModuleTarget(ArraysTarget):
    """Parameters on the CPU are patched as bytes; those elsewhere by an indexed copy that is staged on their device.

    Arguments:
        module: the module.
        hooks: pause, resume and prefix invalidation of the engine around it.
        stamp: what it holds, where that is known.
        buffers, rename: see :func:`module_tensors`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        hooks: Hooks | None = None,
        stamp: Stamp | None = None,
        buffers: bool = False,
        rename: Callable[[str], str] = lambda name: name,
    ) -> None:
        self._staged: dict[str, list[_OnDevice]] = {}
        super().__init__(module_tensors(module, buffers=buffers, rename=rename), stamp=stamp, hooks=hooks)

    def stage(self, update: Update) -> None:
        """Check, and copy positions and values to where the parameters are."""
        for change in update.changes:
            if not change.in_place:
                raise LayoutError(
                    "a module has a fixed set of parameters, and the update adds, removes or re-shapes one",
                    where=f"tensor {change.name!r}",
                    fix="build the module again from the new version",
                )
        remote = {c.name for c in update.changes if not _is_plain(self.arrays.get(c.name))}
        plain = Update(update.source, update.target, tuple(c for c in update.changes if c.name not in remote))
        super().stage(plain)
        for change in update.changes:
            if change.before != self.infos().get(change.name):
                raise LayoutError("the update starts from another dtype or shape", where=f"tensor {change.name!r}")
            if change.name in remote:
                self._staged[change.name] = [_OnDevice(self.arrays[change.name], b) for b in change.blocks]

    def discard(self, update: Update) -> None:
        """See :class:`~halfbyte.refit.target.Target`."""
        super().discard(update)
        self._staged.clear()

    def read(self, name: str) -> Bytes:
        """See :class:`~halfbyte.refit.target.Target`."""
        return flat_bytes(self.arrays[name])

    def _write(self, change: Change, side: Side, *, checked: bool = False) -> None:
        if _is_plain(self.arrays[change.name]):
            super()._write(change, side, checked=checked)
            return
        for block in self._staged[change.name]:
            block.write(side, checked=checked)


class _OnDevice:
    """One stretch of a parameter that cannot be patched as bytes here, staged where it is."""

    def __init__(self, parameter: torch.Tensor, block: BlockPatch) -> None:
        import torch

        widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        unit = block.new.itemsize
        self.parameter, self.kind = parameter, widths[unit]
        start = block.begin // unit
        positions = np.arange(block.count) if block.positions is None else block.positions.astype(np.int64)
        device = parameter.device
        self.index = torch.from_numpy(positions + start).to(device)
        self.values = {
            side: torch.from_numpy(values.copy().view(f"<i{unit}" if unit > 1 else np.uint8)).to(device)
            for side, values in (("old", block.old), ("new", block.new))
        }

    def write(self, side: Side, *, checked: bool) -> None:
        if self.parameter.is_contiguous():
            flat = self.parameter.view(-1).view(self.kind)
            self._put(flat, side, checked)
            return
        flat = self.parameter.contiguous().view(-1).view(self.kind)
        self._put(flat, side, checked)
        self.parameter.copy_(flat.view(self.parameter.dtype).view(self.parameter.shape))

    def _put(self, flat: torch.Tensor, side: Side, checked: bool) -> None:
        if checked and not bool((flat[self.index] == self.values["old"]).all()):
            raise WrongBaseError(
                "values changed under the refit after they were checked", where="a parameter on a device"
            )
        flat[self.index] = self.values[side]


def _is_plain(tensor: Any) -> bool:
    """Whether its bytes can be written here and now."""
    try:
        writable_bytes(tensor)
    except Exception:
        return False
    return True
