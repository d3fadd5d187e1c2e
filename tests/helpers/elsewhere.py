"""A device that is not there, simulated: its tensors report another device (``meta``) and hold their numbers on the CPU.

What a real device would refuse is refused: an operation on tensors of both devices (scalars aside), memory read as if it were
here. Operations compute with the CPU's own kernels, so that numbers can be compared bit by bit. One habit of CUDA is kept: a
divisor that is a number, or a tensor without dimensions on the CPU, is multiplied with by its rounded reciprocal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
aten = torch.ops.aten
#: Operations that a real device lets cross: copies, and indices that are looked up on the CPU.
CROSSING = {aten._to_copy, aten.copy_, aten.index, aten.index_put_, aten.index_put}


class Elsewhere(torch.Tensor):
    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Elsewhere:
        out: Elsewhere = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        out.held = held
        return out

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Elsewhere({self.held})"

    def numpy(self, *, force: bool = False) -> Any:
        raise AssertionError("the memory of another device read as if it were here")

    def tolist(self) -> Any:
        return self.held.tolist()  # a real device copies

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Simulated(TorchDispatchMode):
    """Makes ``meta`` the simulated device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def divided_by_a_scalar(func: Any, a: Any, b: Any = None, **kwargs: Any) -> torch.Tensor:
    """``a / b`` as CUDA computes it for a ``b`` that is no tensor of its own: by the reciprocal, in float32 at least."""
    if kwargs.get("rounding_mode") is not None or not a.is_floating_point():
        return func(a, b, **kwargs)
    wide = torch.promote_types(torch.result_type(a, b), torch.float32)
    out = (a.to(wide) * (1.0 / torch.as_tensor(b, dtype=wide))).to(torch.result_type(a, b))
    return a.copy_(out) if func.overloadpacket is aten.div_ else out


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    theirs = [t for t in tensors if isinstance(t, Elsewhere)]
    ours = [t for t in tensors if not isinstance(t, Elsewhere) and t.dim()]
    asked = kwargs.get("device")
    if not theirs and (asked is None or torch.device(asked).type != DEVICE.type):
        return func(*args, **kwargs)
    if theirs and ours and func.overloadpacket not in CROSSING:
        raise AssertionError(f"{func}: tensors of two devices, {[tuple(t.shape) for t in tensors]}")
    there = bool(theirs) if asked is None else torch.device(asked).type == DEVICE.type
    if func.overloadpacket is aten.copy_ and not isinstance(args[0], Elsewhere):
        there = False
    here = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
    bare = tree_map(lambda t: t.held if isinstance(t, Elsewhere) else t, (args, here))
    if func.overloadpacket in (aten.div, aten.div_) and isinstance(args[0], Elsewhere) and len(theirs) == 1:
        out = divided_by_a_scalar(func, *bare[0], **bare[1])
    else:
        out = func(*bare[0], **bare[1])
    if not there:
        return args[0] if func.overloadpacket is aten.copy_ else out
    wrapped = tree_map(lambda t: Elsewhere(t) if isinstance(t, torch.Tensor) else t, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if theirs else wrapped
