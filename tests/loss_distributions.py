"""Keeps what dp-accounting computes, so that a session of tests computes each thing once and not in every process.

One step's distribution takes dp-accounting a second or more, its compositions another, and nearly every start of the trainer,
the report and the audits in tests asks for the same few. They depend on the arguments of the constructor alone. The folder lives
as long as the session, so that nothing of another version of dp-accounting is ever read.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "TEST_LOSS_DISTRIBUTIONS"
"""The variable that names the folder to processes of the session."""
CONSTRUCTORS = (
    "from_gaussian_mechanism",
    "from_mixture_gaussian_mechanism",
    "from_truncated_subsampled_gaussian_mechanism",
)
SLOW = 0.3  # seconds; what is made faster than this is not worth its megabytes


def share() -> None:
    """From here on this process and its forks take what the session's folder holds, and put there what is new."""
    from dp_accounting.pld import privacy_loss_distribution

    if FOLDER in os.environ:
        folder = Path(os.environ[FOLDER])
        for name in CONSTRUCTORS:
            setattr(
                privacy_loss_distribution,
                name,
                shared(getattr(privacy_loss_distribution, name), folder),
            )


def shared(make: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """`make`, called once for the same arguments in all processes."""

    @functools.wraps(make)
    def kept(*arguments: Any, **named: Any) -> "Kept":
        key = pickle.dumps((make.__name__, arguments, sorted(named.items())))
        return Kept(
            folder, key, lambda: _kept(folder, key, lambda: make(*arguments, **named), SLOW)
        )

    return kept


class Kept:
    """A loss distribution that is made when anything but a known epsilon of its compositions is asked for."""

    def __init__(self, folder: Path, key: bytes, make: Callable[[], Any]) -> None:
        self._folder, self._key, self._make = folder, key, make

    @functools.cached_property
    def _whole(self) -> Any:
        return self._make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def self_compose(self, count: int) -> "Kept":
        return Kept(
            self._folder, pickle.dumps((self._key, count)), lambda: self._whole.self_compose(count)
        )

    def get_epsilon_for_delta(self, delta: float) -> Any:
        key = pickle.dumps((self._key, "epsilon", delta))
        return _kept(self._folder, key, lambda: self._whole.get_epsilon_for_delta(delta), 0.0)


def _kept(folder: Path, key: bytes, make: Callable[[], Any], at_least: float) -> Any:
    path = folder / hashlib.sha256(key).hexdigest()
    if path.exists():
        return pickle.loads(path.read_bytes())
    start = time.monotonic()
    made = make()
    if time.monotonic() - start >= at_least:
        with contextlib.suppress(OSError):  # some tests let no process write
            being_written = path.with_suffix(f".{os.getpid()}")
            being_written.write_bytes(pickle.dumps(made))
            being_written.replace(path)
    return made
