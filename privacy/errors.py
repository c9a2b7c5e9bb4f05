"""Errors that a user can mend. An exception with `exit_code` ends a command with one line and that code."""


class PrivacyConfigError(ValueError):
    """The privacy parameters, or the model they shall protect, are refused."""

    exit_code = 2


class BudgetSpent(RuntimeError):
    """The next intent would pass the budget; steps remain."""

    exit_code = 3


class PrivacyStateRefused(RuntimeError):
    """Ledger, key, mirror or manifest do not fit together: starting could spend budget unseen."""

    exit_code = 4


class NotRecorded(PrivacyStateRefused):
    """A checkpoint is not the one that the ledger around it recorded."""
