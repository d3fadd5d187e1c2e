"""What a run will take before it is run: memory by precision, KV capacity, guidance, refits, and the share of the rollout."""
