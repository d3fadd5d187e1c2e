"""Hypothesis without a deadline: on a shared machine any call may take a second."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
