import os

import pytest


@pytest.fixture
def no_fsync(monkeypatch):
    """For tests that open hundreds of ledgers and are not about durability."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
