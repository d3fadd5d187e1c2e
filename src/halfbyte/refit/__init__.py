"""Delta refit: weights go from a trainer to engines as what changed, and never half-happen."""
