import functools
import os

import pytest

from privacy.step import folder

for name in ("_git", "version"):  # every start asks thrice, by processes of git
    setattr(folder, name, functools.cache(getattr(folder, name)))


@pytest.fixture
def no_fsync(monkeypatch):
    """For tests that open hundreds of ledgers and are not about durability."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
