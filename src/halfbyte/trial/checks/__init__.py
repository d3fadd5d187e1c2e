"""The checks of a verdict: each takes pairs or blocks and a limit, and returns a :class:`halfbyte.trial.outcome.Check`."""
