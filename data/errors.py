"""Errors that a user can mend. An exception with `exit_code` ends a command with one line and that code."""


class DataError(ValueError):
    """The data or the request for it is wrong: missing, empty or malformed shards, bad arguments."""

    exit_code = 2


class ReadError(OSError):
    """Bytes that the index promises cannot be read (a shard vanished, the disk failed).

    Never turned into a zero gradient: the step is not taken (docs: privacy contract, point 2).
    """

    exit_code = 1


class DecodeError(ValueError):
    """The bytes of one example are not an image with a caption; decided from its own bytes alone."""
