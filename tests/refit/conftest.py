"""Fixtures of the refit's tests."""

from __future__ import annotations

import pytest
from refit_case import Trainer


@pytest.fixture
def trainer() -> Trainer:
    """A small trainer at its first version."""
    return Trainer()


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations come in the same order every time."""
    monkeypatch.setenv("HALFBYTE_THREADS", "1")
