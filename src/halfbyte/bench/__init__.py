"""Benchmarks: our kernels and our engine beside their baselines in one process, results checked (docs/benchmarks.md)."""
