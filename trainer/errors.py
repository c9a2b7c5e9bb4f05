"""Defines errors of the trainer that a user can mend, and exports those of privacy/errors.py."""

from privacy.errors import (
    ConfigError,
    ErrorLine,
    RemoteError,
    StepDropped,
    WeightsNotFinite,
    in_one_line,
)

__all__ = [
    "ConfigError",
    "ErrorLine",
    "HostError",
    "RemoteError",
    "StepDropped",
    "WeightsNotFinite",
    "in_one_line",
]


class HostError(RuntimeError):
    """A host lacks files or programs that the others have; its own ranks report it."""

    exit_code = 2
