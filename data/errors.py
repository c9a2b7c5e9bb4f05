"""Errors that a user can mend; one with an `exit_code` ends a command with one line."""


class DataError(ValueError):
    """An error in the data or the request: missing, empty or malformed shards, bad arguments."""

    exit_code = 2


class ReadError(OSError):
    """An error of reading bytes that the index promises: a shard vanished, the disk failed.

    It never becomes a zero gradient: the step is not taken (docs/guarantee.md, point 2).
    """

    exit_code = 1


class DecodeError(ValueError):
    """An error in one example's own bytes, which are not an image with a caption.

    The example's bytes alone decide about it.
    """
