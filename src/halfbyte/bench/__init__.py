"""Benchmarks: our kernels and our engine beside their baselines, in one process, with a correctness column (docs/benchmarks.md)."""
