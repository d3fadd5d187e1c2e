"""Is the lower-precision model good enough? A paired trial of two servers on the same tasks, with one verdict.

Nothing here imports torch.
"""
