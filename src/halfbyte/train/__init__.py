"""The training loop and its run folder."""

from halfbyte.train.run import open_model, run

__all__ = ["open_model", "run"]
