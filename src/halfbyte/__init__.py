"""halfbyte: reinforcement learning of language models with 4-bit (FP4) rollouts."""

__version__ = "0.1.0"
