"""Errors of the trainer that a user can mend; those of the library are in privacy/errors.py and known here too."""

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
    """A host lacks what the others have; its ranks say so themselves, since nobody else knows."""

    exit_code = 2
