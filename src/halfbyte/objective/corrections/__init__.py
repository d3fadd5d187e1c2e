"""The corrections by name. A new rule is one module here and one line in ``CORRECTIONS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from halfbyte.objective.correction import Correction
from halfbyte.objective.corrections.cispo import Cispo
from halfbyte.objective.corrections.dppo import DppoKl, DppoTv
from halfbyte.objective.corrections.geometric_rejection import GeometricRejection
from halfbyte.objective.corrections.gspo import Gspo
from halfbyte.objective.corrections.icepop import IcePop
from halfbyte.objective.corrections.none import NoCorrection
from halfbyte.objective.corrections.opsm import Opsm
from halfbyte.objective.corrections.sequence_tis import SequenceMis, SequenceTis
from halfbyte.objective.corrections.token_tis import TokenTis
from halfbyte.objective.options import build
from halfbyte.objective.triage import Triage

__all__ = [
    "CORRECTIONS",
    "Cispo",
    "DppoKl",
    "DppoTv",
    "GeometricRejection",
    "Gspo",
    "IcePop",
    "NoCorrection",
    "Opsm",
    "SequenceMis",
    "SequenceTis",
    "TokenTis",
    "make_correction",
]

CORRECTIONS: Mapping[str, Callable[..., Correction]] = MappingProxyType(
    {
        "none": NoCorrection,
        "token_tis": TokenTis,
        "sequence_tis": SequenceTis,
        "icepop": IcePop,
        "sequence_mis": SequenceMis,
        "opsm": Opsm,
        "geometric_rejection": GeometricRejection,
        "dppo_tv": DppoTv,
        "dppo_kl": DppoKl,
        "gspo": Gspo,
        "cispo": Cispo,
        "triage": Triage,
    }
)
"""Name -> class. Read only: rules of other packages are passed as objects, not registered."""


def make_correction(name: str, /, **parameters: object) -> Correction:
    """Build a correction from configuration.

    Arguments:
        name: a key of ``CORRECTIONS``.
        parameters: the fields of that class, for example ``cap=2.0``.

    Raises:
        ConfigError: unknown name or parameter, or a value that the rule refuses.
    """
    return build("correction", CORRECTIONS, name, parameters)
