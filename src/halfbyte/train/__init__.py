"""The training loop and its run folder."""

from halfbyte.train.run import run

__all__ = ["run"]
