"""FP4 checkpoints: how three file formats name and store codes, what config.json says of them, and reading them back."""

from halfbyte.models.fp4.quantisation import Quantisation, read_quantisation
from halfbyte.models.fp4.stored import CodedSource, StoredCodes, find_coded
from halfbyte.models.fp4.style import STYLES, Style, StyleName

__all__ = [
    "STYLES",
    "CodedSource",
    "Quantisation",
    "StoredCodes",
    "Style",
    "StyleName",
    "find_coded",
    "read_quantisation",
]
