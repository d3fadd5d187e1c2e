"""Targets of a refit: what takes new weights."""
