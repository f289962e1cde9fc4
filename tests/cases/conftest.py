"""Shared by the replays."""

import pytest


@pytest.fixture
def short_of_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that fails leaves a store in the middle of something; it is not waited for."""
    monkeypatch.setattr("kvire.store.tiered.FLUSH_S", 0.2)
    monkeypatch.setattr("kvire.store.tiered.JOIN_S", 0.2)
