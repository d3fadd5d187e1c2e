"""``torch.compile`` held to the bits of the eager function.

A compiler may fuse a product and a sum, divide by an approximate reciprocal, keep BF16 intermediates in float32 or flush
subnormals; each changes bits. So three things are done:

- Inductor is told not to (:data:`NUMERICS`).
- What is compiled is small: one true division or product an element, comparisons, integers, and products of a table. What
  decides block scales (BF16 arithmetic, divisions by constants, FP8 casts, float64 logarithms, squared errors) stays eager.
- Nothing is believed: before its first use each function is compared with itself, uncompiled, on a probe that holds the
  values where implementations part. One differing bit, or a compiler that fails, and the eager function is used instead
  (or an error raised, where compiling was insisted on).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor

from halfbyte.errors import ConfigError

__all__ = ["NUMERICS", "Compile", "compile_exactly", "same_bits"]

_LOG = logging.getLogger(__name__)
Compile = Literal["off", "auto", "on"]
"""``off``; ``auto``: on CUDA, with a fall-back; ``on``: anywhere, and where it cannot be exact an error."""
Function = Callable[..., Tensor]

#: What inductor is asked for; an option that the installed torch does not have is left out, and the probe decides.
NUMERICS: dict[str, Any] = {
    "emulate_precision_casts": True,  # round BF16 where eager does; on GPUs also: no fused multiply-add, CUDA's libdevice
    "eager_numerics.division_rounding": True,  # a GPU's division rounds to nearest
    "eager_numerics.disable_ftz": True,  # subnormal numbers stay
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RECOMPILATIONS = 64
_chosen: dict[Hashable, tuple[Function, str]] = {}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same bits (which tells +0 from -0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integers = _INTEGERS[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


def compile_exactly(
    key: Hashable, name: str, function: Function, probe: Callable[[], tuple[Tensor, ...]], *, insist: bool = False
) -> Function:
    """``function``, compiled, if it then has the same bits; else ``function`` itself.

    Arguments:
        key: tells ``function`` from others by all that it closes over, by the device and the dtypes it is called with.
        name: of the function, for messages.
        function: of tensors, without gradient; the size of any dimension may change from call to call.
        probe: its arguments for the comparison.
        insist: raise instead of falling back.

    Raises:
        ConfigError: with ``insist``, where the compiled function differs or cannot be had.
    """
    if key not in _chosen:
        _chosen[key] = _choose(name, function, probe)
    found, problem = _chosen[key]
    if problem and insist:
        raise ConfigError(
            f"a compiled kernel is not used: {problem}", where=name, fix='learner.compile = "auto" or "off"'
        )
    return found


def _choose(name: str, function: Function, probe: Callable[[], tuple[Tensor, ...]]) -> tuple[Function, str]:
    arguments = probe()
    wanted = function(*arguments)
    try:
        compiled = _compiled(function)
        got = compiled(*arguments)
    except Exception as error:  # whatever a compiler chain may raise: the eager function does the same
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    else:
        if same_bits(got, wanted):
            return _lasting(name, compiled, function), ""
        problem = "it differs from the eager function in some bits"
    _LOG.warning("%s runs uncompiled: %s", name, problem)
    return function, problem


def _lasting(name: str, compiled: Function, function: Function) -> Function:
    """``compiled``, as long as the compiler keeps up: it compiles again for arguments of another kind, a limited number of times.
    From its first failure on ``function``, which does the same."""
    limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    failed = False

    def call(*arguments: Tensor) -> Tensor:
        nonlocal failed
        if not failed:
            try:
                with torch._dynamo.config.patch({limit: _RECOMPILATIONS}):
                    return compiled(*(x.contiguous() for x in arguments))
            except Exception as error:  # as in _choose
                failed = True
                _LOG.warning("%s runs uncompiled from now on: %s", name, type(error).__name__)
        return function(*arguments)

    return call


def _compiled(function: Function) -> Function:
    known = set(torch._inductor.list_options())
    # Torch counts its recompilations by code object, and all closures of one definition share one: give each its own.
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    options = {name: value for name, value in NUMERICS.items() if name in known}
    compiled: Function = torch.compile(own, dynamic=True, fullgraph=True, options=options)
    return compiled
