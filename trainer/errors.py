"""Errors that a user can mend. An exception with `exit_code` ends a command with one line and that code."""


class ConfigError(ValueError):
    """A recipe, an override, a ds_config or a run folder is wrong; the message says what, where and how to mend it."""

    exit_code = 2


class HostError(RuntimeError):
    """A host lacks what the others have; its ranks say so themselves, since nobody else knows."""

    exit_code = 2


class StepDropped(RuntimeError):
    """All ranks agreed to drop a step before its intent: nothing of it left its process, and it costs nothing."""


class RemoteError(RuntimeError):
    """Another rank failed; carries its exit code so that all ranks end alike."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code
