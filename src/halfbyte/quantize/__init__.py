"""Writing FP4 checkpoints: which weights, under which scales, in whose format; reading them is ``models/fp4``."""
