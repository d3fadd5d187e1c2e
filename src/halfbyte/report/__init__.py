"""The report of a run: one offline HTML file with inline SVG, written from a run folder. Imports no torch."""

from halfbyte.report.page import build

__all__ = ["build"]
