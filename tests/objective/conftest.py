"""Hypothesis without a deadline: on a shared machine the first call of a torch operation can take seconds."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
