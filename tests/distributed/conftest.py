"""Small models take the way of large ones."""

from collections.abc import Iterator

import pytest

from privacy.clipping import clipped_sum


@pytest.fixture(autouse=True)
def sums_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are so small that all their gradients would be written out; ranks are told, too."""
    monkeypatch.setattr(clipped_sum, "WRITTEN_ENTRIES", 0)


@pytest.fixture(scope="module")
def sums_products_in_all() -> Iterator[None]:
    """The same for ranks that a whole module shares."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clipped_sum, "WRITTEN_ENTRIES", 0)
        yield
