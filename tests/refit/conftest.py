"""Fixtures of the refit's tests."""

from __future__ import annotations

import pytest
from refit_case import Trainer


@pytest.fixture
def trainer() -> Trainer:
    """A small trainer at its first version."""
    return Trainer()
