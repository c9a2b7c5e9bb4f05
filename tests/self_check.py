"""A stand-in for the self-check of a start, for tests about something else: it is more than half of a small start."""

import contextlib
from collections.abc import Iterator

import pytest

from privacy.guards import selfcheck

COMPARISONS = ("_by_groups", "require_nothing_gathered", "require_unconditional", "require_padding")
"""What `check_against_autograd` asks of a model before it notes that the model has passed."""


@contextlib.contextmanager
def trusted_models() -> Iterator[None]:
    """Lets every model pass the self-check; whatever else a start and a step look at stays."""
    with pytest.MonkeyPatch.context() as patch:
        for name in COMPARISONS:
            patch.setattr(selfcheck, name, lambda *_arguments: None)
        for module in ("trainer.run.start", "privacy.loop.opening"):
            patch.setattr(f"{module}.check_at_size", lambda *_arguments, **_settings: None)
        yield
