"""The mathematics of a trial: pure functions on counts and arrays. numpy only; scipy and statsmodels are test oracles."""

from halfbyte.trial.statistics import mcnemar, percentiles, repeats, resample, tango, unconditional

__all__ = ["mcnemar", "percentiles", "repeats", "resample", "tango", "unconditional"]
