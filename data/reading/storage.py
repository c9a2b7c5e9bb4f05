"""Where shards lie: what the index and the reader ask of a place, local or remote.

A place hands out exact bytes or an error; it never decides what the bytes mean. Every block of bytes is checked against
the checksum in the index before anything else sees it, wherever it came from.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from data.errors import DataError
from data.index.shards import is_url
from data.reading.local import LocalStorage
from data.reading.records import ReadRequest, RemoteOptions, ShardStatus


class Storage(Protocol):
    """A place with shards. Cheap to make; files and connections open when they are first needed."""

    root: str

    def status(self, names: Sequence[str]) -> Iterator[ShardStatus | DataError]:
        """Size and version of each shard, in this order; an error that says so where a shard is missing or empty.

        Raises:
            ReadError: the place does not answer.
        """

    def local_copy(self, name: str) -> AbstractContextManager[Path]:
        """The whole shard as a local file, for as long as the context lasts."""

    def read_all(self, requests: Sequence[ReadRequest]) -> Iterator[bytes]:
        """The bytes of each request, in this order, checked; later ones are fetched while earlier ones are used.

        Raises:
            ReadError: bytes that the index promises cannot be had.
        """

    def close(self) -> None:
        """Releases files and connections; the next read opens them again."""


def require_present(statuses: Iterable[ShardStatus | DataError]) -> Iterator[ShardStatus]:
    """Passes on what `Storage.status` says.

    Raises:
        DataError: a shard is missing or empty.
    """
    for status in statuses:
        if isinstance(status, DataError):
            raise status
        yield status


def open_storage(root: str, remote: RemoteOptions) -> Storage:
    """The place that a root names.

    Raises:
        DataError: a scheme without a driver, or plain http to another host.
    """
    if is_url(root):
        from data.reading.remote import RemoteStorage  # network libraries are imported only for network shards

        return RemoteStorage(root, remote)
    return LocalStorage(root)
