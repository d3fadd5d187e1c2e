"""Seeded synthetic traces of training: BF16 weights under Adam with FP32 masters. Numpy only.

Masters are drawn from N(0, 0.02). Each gradient is a fixed direction plus fresh noise, in the share that ``signal`` says; the
moments start at their stationary values, so the first step is like any other. What a trace cannot show: correlations between
neighbouring weights (a row whose input is silent does not move), and layers of different scale.

    python -m halfbyte.bench.refit_traces   # change rates and step sizes of the named traces
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["TRACES", "AdamTrace", "to_bf16"]

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-12


def to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bit patterns of finite floats rounded to BF16, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class AdamTrace:
    """Weights of ``n`` elements under Adam.

    Arguments:
        n: elements.
        lr: learning rate.
        signal: 0 for gradients of pure noise (steps of about .23 lr), 1 for a fixed direction (steps of lr).
        seed: of everything drawn.
    """

    n: int
    lr: float = 1e-6
    signal: float = 0.2
    seed: int = 0

    def versions(self) -> Iterator[npt.NDArray[np.uint16]]:
        """BF16 bit patterns [n] before the first step, after it, after the second, without end."""
        rng = np.random.default_rng(self.seed)

        def normal() -> npt.NDArray[np.float32]:
            return rng.standard_normal(self.n, np.float32)

        weight, noise = normal() * np.float32(0.02), np.float32(np.sqrt(1 - self.signal**2))
        direction = normal() * np.float32(self.signal)
        m = direction + normal() * noise * np.float32(np.sqrt((1 - _BETA1) / (1 + _BETA1)))
        v = direction**2 + noise**2
        yield to_bf16(weight)
        while True:
            gradient = direction + normal() * noise
            m = np.float32(_BETA1) * m + np.float32(1 - _BETA1) * gradient
            v = np.float32(_BETA2) * v + np.float32(1 - _BETA2) * gradient**2
            weight -= np.float32(self.lr) * m / (np.sqrt(v) + np.float32(_EPS))
            yield to_bf16(weight)

    def step(self) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
        """(base, target) of the first step."""
        versions = self.versions()
        return next(versions), next(versions)


#: The traces that results are stated on: learning rate and share of signal by name.
TRACES = {"1.2%": (1e-6, 0.2), "3.1%": (1.24e-6, 0.75), "25%": (2.7e-5, 0.5)}


def main() -> None:
    """Print what the named traces do."""
    for name, (lr, signal) in TRACES.items():
        base, target = AdamTrace(1 << 22, lr, signal).step()
        moved = base != target
        ranks = [np.where(bits & 0x8000, bits ^ 0xFFFF, bits ^ 0x8000).astype(np.int64) for bits in (base, target)]
        steps = np.abs(ranks[1] - ranks[0])[moved]
        print(
            f"{name:>6}: {moved.mean():.2%} of the weights change, {(steps == 1).mean():.1%} of them by one BF16 step"
        )


if __name__ == "__main__":
    main()
