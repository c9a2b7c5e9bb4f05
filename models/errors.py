"""Errors that a user can mend. An exception with `exit_code` ends a command with one line and that code."""


class ModelConfigError(ValueError):
    """The requested model cannot be built: unknown size or field, or values that do not fit together."""

    exit_code = 2
