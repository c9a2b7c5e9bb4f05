"""Types that storages, the index and the reader share: shards, their states, requests, options."""

import zlib
from dataclasses import dataclass
from typing import NamedTuple

from data.errors import ReadError


@dataclass(frozen=True)
class ShardEntry:
    """A manifest's record of one shard.

    Attributes:
        name: relative to the root.
        size: in bytes.
        sha256: SHA-256 of its bytes, in hex.
        count: number of examples.
        keys_sha256: SHA-256 of the list of its keys, in hex.
        repeated_keys: examples whose key came before in the same shard (copies count as a group in
            privacy).
        skipped: members that belong to no example: links, devices, folders, hidden or nameless
            files.
        several_pictures: examples with more than one picture, of which the first is used.
        no_picture: examples without a picture, by the names of members.
        no_text: examples with a picture but without caption or label, by the names of members.
        version: the shard's state when it was indexed, KIND:VALUE: `mtime_ns` of a file, `etag` or
            `modified` of an object; empty if the storage tells none.
    """

    name: str
    size: int
    sha256: str
    count: int
    keys_sha256: str
    repeated_keys: int
    skipped: int
    several_pictures: int
    no_picture: int
    no_text: int
    version: str


class ShardStatus(NamedTuple):
    """The present size in bytes and version of a shard; see `ShardEntry.version`."""

    size: int
    version: str


class ReadRequest(NamedTuple):
    """A request for one example's bytes: `length` at `offset`, which must have this CRC-32."""

    shard: ShardEntry
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True)
class RemoteOptions:
    """Options for reading shards over the network; local files need none of them.

    Attributes:
        timeout_seconds: limit of one request.
        tries: tries of one request, with doubling pauses between them.
        backoff_seconds: the first pause.
        connections: requests at the same time, per process.
        allow_plain_http: permit http:// to other hosts than this one. An observer of the requests
            knows which examples were sampled.
    """

    timeout_seconds: float = 60.0
    tries: int = 6
    backoff_seconds: float = 0.5
    connections: int = 16
    allow_plain_http: bool = False


def check_crc(request: ReadRequest, extent: bytes, location: str) -> bytes:
    """Returns the extent if it has the bytes that were indexed.

    Args:
        location: the shard's name in messages.

    Raises:
        ReadError: the bytes differ.
    """
    if len(extent) != request.length or zlib.crc32(extent) != request.crc32:
        raise ReadError(
            f"{location} at byte {request.offset} does not fit its index: the bytes changed; "
            "verify the shards"
        )
    return extent
