"""The healthy reference: what segment statistics look like without damage.

A detector that compares segments with each other goes blind once most of them are damaged, so level and scale come from
earlier, healthy batches: the first ones (frozen) or a slow average of segments that raised no suspicion (EMA).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from torch import Tensor

from halfbyte.errors import CheckpointError

__all__ = ["Reference", "measure"]


@dataclass(frozen=True)
class Reference:
    """Level and scale of the amplification E of healthy segments.

    Arguments:
        loc: nats, median E.
        scale: nats, 1.4826 median |sqrt(n / length) (E - loc)|: the standard deviation, were E normal, of a segment of
            ``length`` diagnosed tokens.
        length: tokens, median n.
        batches: rollout batches it was measured on.
    """

    loc: float
    scale: float
    length: float
    batches: float = 1.0

    def z(self, amplification: Tensor, count: Tensor, floor: float) -> Tensor:
        """[S] float32: z = sqrt(n / length) (E - loc) / max(scale, floor)."""
        return (count / self.length).sqrt() * (amplification - self.loc) / max(self.scale, floor)

    def mixed(self, other: Reference, weight: float) -> Reference:
        """(1 - weight) of this one and ``weight`` of ``other``; the batches add up."""
        mean = {k: (1 - weight) * getattr(self, k) + weight * getattr(other, k) for k in ("loc", "scale", "length")}
        return Reference(**mean, batches=self.batches + other.batches)

    def to_state(self) -> dict[str, float]:
        """JSON numbers, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> Reference | None:
        """What :meth:`to_state` gave; None for the empty state.

        Raises:
            CheckpointError: a number is missing or has no meaning.
        """
        if not state:
            return None
        names = [f.name for f in fields(cls)]
        try:
            found = cls(**{name: float(state[name]) for name in names})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"reference statistics lack {error}", expected=", ".join(names)) from error
        if not (found.scale >= 0 and found.length > 0 and found.batches >= 1 and abs(found.loc) < float("inf")):
            raise CheckpointError(f"reference statistics {found}", expected="scale >= 0, length > 0, batches >= 1")
        return found


def measure(amplification: Tensor, count: Tensor) -> Reference | None:
    """Median and MAD over segments: up to half of them may be damaged before the level moves far.

    Arguments:
        amplification: [S] float32, E. count: [S] float32, diagnosed tokens.

    Returns:
        None without any segment.
    """
    if count.numel() == 0:
        return None
    loc, length = amplification.median(), count.median()
    deviation = ((count / length).sqrt() * (amplification - loc)).abs().median()
    return Reference(float(loc), 1.4826 * float(deviation), float(length))
