"""Types that storages, the index and the reader share: shards, their states, requests and options."""

import zlib
from dataclasses import dataclass
from typing import NamedTuple

from data.errors import ReadError


@dataclass(frozen=True)
class ShardEntry:
    """What a manifest keeps of one shard.

    Attributes:
        name: relative to the root.
        size: in bytes.
        sha256: SHA-256 of its bytes, in hex.
        count: number of examples.
        keys_sha256: SHA-256 of the list of its keys, in hex.
        repeated_keys: examples whose key came before in the same shard (copies count as a group in privacy).
        skipped: members that belong to no example: links, devices, folders, hidden or nameless files.
        several_pictures: examples with more than one, of which the first is used.
        no_picture, no_text: examples that lack a picture, or that have one without caption or label; by the names of members.
        version: its state when it was indexed, KIND:VALUE: `mtime_ns` of a file, `etag` or `modified` of an
            object; empty when there is nothing.
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
    """Size in bytes and version of a shard as it is now; see `ShardEntry.version`."""

    size: int
    version: str


class ReadRequest(NamedTuple):
    """One example's bytes: `length` at `offset`, which must have this CRC-32."""

    shard: ShardEntry
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True)
class RemoteOptions:
    """How shards are read over the network; local files need none of it.

    Attributes:
        timeout_seconds: how long one request may take.
        tries: how often one request is tried, with doubling pauses between the tries.
        backoff_seconds: the first pause.
        connections: requests at the same time, per process.
        allow_plain_http: permit http:// to hosts other than this one. Whoever sees the requests knows who was sampled.
    """

    timeout_seconds: float = 60.0
    tries: int = 6
    backoff_seconds: float = 0.5
    connections: int = 16
    allow_plain_http: bool = False


def check_crc(request: ReadRequest, data: bytes, where: str) -> bytes:
    """Returns the data if they are the bytes that were indexed.

    Raises:
        ReadError: they are not.
    """
    if len(data) != request.length or zlib.crc32(data) != request.crc32:
        raise ReadError(
            f"{where} at byte {request.offset} does not fit its index: the bytes changed; verify the shards"
        )
    return data
