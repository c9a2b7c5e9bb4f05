"""Shards over the network: range requests through fsspec, with timeouts, retries and bounded parallelism.

Whoever serves the shards sees which examples are asked for, and so who is in every batch: it must stand inside the trust
boundary (docs/data.md). What fails for good is a ReadError and ends the run before the step is charged; bytes of this
kind never become a zero gradient.
"""

import errno
import functools
import os
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import AsyncFileSystem

from data.errors import DataError, ReadError
from data.reading.records import ReadRequest, RemoteOptions, ShardStatus, check_crc

if TYPE_CHECKING:
    from aiohttp import TraceConfig, TraceRequestRedirectParams

T = TypeVar("T")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LONGEST_PAUSE_SECONDS = 30.0
_MAX_BYTES_AHEAD = 64 << 20
_VERSIONS = {
    "ETag": "etag",
    "etag": "etag",
    "Last-Modified": "modified",
    "LastModified": "modified",
    "mtime": "modified",
}
"""Names that drivers give to what changes with an object."""
_QUERY = re.compile(r"\?[^\s'\"]*")
"""What may hold a signature, in the address of a redirect."""
_GONE, _REFUSED = "it is gone", "access is refused"
_FINAL = {401: _REFUSED, 403: _REFUSED, 404: _GONE, 410: _GONE}
_FINAL |= {412: "it changed since it was indexed (ETag)", 416: "it is shorter than its index says"}


class RemoteStorage:
    """See `data.reading.storage.Storage`. Another process (after a fork or by pickle) opens its own connections."""

    def __init__(self, root: str, options: RemoteOptions):
        self.root = root
        self._options = options
        parts = urlsplit(root)
        if (
            parts.scheme == "http"
            and parts.hostname not in _LOOPBACK
            and not options.allow_plain_http
        ):
            raise DataError(
                f"{root} is not encrypted: whoever sees the requests knows who is in every batch; use https, or set "
                "data.remote.allow_plain_http = true where the whole network may know"
            )
        self._is_http = parts.scheme in ("http", "https")
        self._filesystem = _filesystem(root, options)
        self._threads: ThreadPoolExecutor | None = None
        self._owner = os.getpid()

    def status(self, names: Sequence[str]) -> Iterator[ShardStatus | DataError]:
        return self._ahead(names, self._status, lambda _name: 0)

    def fetch(self, name: str, status: ShardStatus, path: Path) -> None:
        url = f"{self.root}/{name}"

        def whole() -> None:
            self._filesystem.get_file(url, str(path), **self._if_match(status.version))
            if path.stat().st_size != status.size:
                raise ReadError(f"it was sent with {path.stat().st_size} of {status.size} bytes")

        self._retry(url, whole)

    def read_all(self, requests: Sequence[ReadRequest]) -> Iterator[bytes]:
        def read(request: ReadRequest) -> bytes:
            url = f"{self.root}/{request.shard.name}"
            return self._retry(url, lambda: fetch(url, request))

        def fetch(url: str, request: ReadRequest) -> bytes:
            span = {"start": request.offset, "end": request.offset + request.length}
            how = self._if_match(request.shard.version) | self._timeout()
            data: bytes = self._filesystem.cat_file(url, **span, **how)
            if len(data) > request.length:
                raise _FinalError(f"cannot read {url}: its server does not serve ranges")
            if len(data) < request.length:
                raise ReadError(f"{len(data)} of {request.length} bytes at byte {request.offset}")
            return check_crc(request, data, url)

        return self._ahead(requests, read, lambda request: request.length)

    def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None and self._owner == os.getpid():
            threads.shutdown(wait=False, cancel_futures=True)

    def _ahead(
        self, items: Sequence[Any], function: Callable[[Any], T], size: Callable[[Any], int]
    ) -> Iterator[T]:
        """Results in order; at most one call per connection at a time, as many results waiting, and few bytes of them."""
        if self._threads is None or self._owner != os.getpid():
            self._threads, self._owner = (
                ThreadPoolExecutor(self._options.connections, "shards"),
                os.getpid(),
            )
        threads = self._threads
        pending: deque[tuple[Future[T], int]] = deque()
        waiting = 0
        try:
            for item in items:
                while pending and (
                    len(pending) >= 2 * self._options.connections
                    or waiting + size(item) > _MAX_BYTES_AHEAD
                ):
                    future, length = pending.popleft()
                    waiting -= length
                    yield future.result()
                pending.append((threads.submit(function, item), size(item)))
                waiting += size(item)
            while pending:
                yield pending.popleft()[0].result()
        finally:
            for future, _ in pending:
                future.cancel()

    def _status(self, name: str) -> ShardStatus | DataError:
        url = f"{self.root}/{name}"
        try:
            info = self._retry(url, lambda: self._filesystem.info(url, **self._timeout()))
        except ReadError as error:
            if _final_reason(error.__cause__) == _GONE:
                return DataError(f"missing or empty shards: {error}")
            raise
        if info.get("partial") is False:
            return DataError(f"{url}: its server does not serve ranges; use one that does")
        if not info.get("size"):
            return DataError(
                f"missing or empty shards: {url} is empty, or its server does not say how long it is"
            )
        version = next((f"{_VERSIONS[key]}:{info[key]}" for key in _VERSIONS if info.get(key)), "")
        return ShardStatus(int(info["size"]), version)

    def _timeout(self) -> dict[str, Any]:
        # fsspec's synchronous calls of asynchronous drivers take it; other drivers have their own.
        return (
            {"timeout": self._options.timeout_seconds}
            if isinstance(self._filesystem, AsyncFileSystem)
            else {}
        )

    def _if_match(self, version: str) -> dict[str, Any]:
        """The server itself refuses when the file is another one. Only a strong ETag allows that (RFC 9110, 13.1.1)."""
        if not self._is_http:
            return {}
        headers = {"Accept-Encoding": "identity"}
        is_strong = version.startswith('etag:"')
        return {
            "headers": headers | ({"If-Match": version.removeprefix("etag:")} if is_strong else {})
        }

    def _retry(self, url: str, call: Callable[[], T]) -> T:
        """Tries again with doubling pauses, unless the answer is final.

        Raises:
            ReadError: the answer is final, or the last try failed too.
        """
        pause = self._options.backoff_seconds
        for number in range(1, self._options.tries + 1):
            try:
                return call()
            except _FinalError:
                raise
            except Exception as error:  # drivers raise exceptions of their own libraries
                if reason := _final_reason(error):
                    raise ReadError(f"cannot read {url}: {reason}") from error
                if number == self._options.tries:
                    link = error.__cause__ if isinstance(error.__cause__, Exception) else error
                    words = _QUERY.sub("", str(link).partition(chr(10))[0])[:200]
                    problem = f"{type(link).__name__} {words}".strip()
                    problem = str(error) if isinstance(error, ReadError) else problem
                    raise ReadError(f"cannot read {url} in {number} tries: {problem}") from error
            time.sleep(min(pause, _LONGEST_PAUSE_SECONDS) * random.uniform(0.5, 1.0))
            pause *= 2
        raise AssertionError("tries is at least 1")


class _FinalError(ReadError):
    """An answer that another try would not change."""


class _RefusedRedirectError(Exception):
    """A redirect that is not followed, and why."""


def _final_reason(error: BaseException | None) -> str | None:
    """Why another try is of no use, or None."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the copy cannot be written: {error.strerror}"
    # fsspec reports every failed HEAD as a missing file; the cause says why.
    for link in (error, error.__cause__ if error else None):
        if isinstance(link, _RefusedRedirectError):
            return str(link)
        status = getattr(link, "status", None)
        if isinstance(status, int):
            return _FINAL.get(status)
    if isinstance(error, FileNotFoundError):
        return _GONE if error.__cause__ is None else None
    return _REFUSED if isinstance(error, PermissionError) else None


@functools.cache
def _stays_encrypted() -> "TraceConfig":
    """Looks at each redirect before it is followed: none leads from https to http, where anybody sees who is in every batch."""
    import aiohttp
    from yarl import URL  # what aiohttp itself reads the next address with

    async def check(
        _session: object, _context: object, redirect: "TraceRequestRedirectParams"
    ) -> None:
        headers = redirect.response.headers
        target = redirect.url.join(URL(headers.get("Location") or headers.get("URI") or ""))
        if redirect.url.scheme == "https" and target.scheme != "https":
            redirect.response.close()
            place = f"{target.scheme}://{target.host}"  # the rest may hold a signature
            raise _RefusedRedirectError(
                f"it redirects to {place}, which is not encrypted; give an address that leads over https all the way"
            )

    rule = aiohttp.TraceConfig()
    rule.on_request_redirect.append(check)
    return rule


def _filesystem(root: str, options: RemoteOptions) -> Any:
    """fsspec's driver for a scheme; credentials come from the driver's own environment."""
    scheme = urlsplit(root).scheme
    settings: dict[str, Any] = {}
    if scheme in ("http", "https"):
        import aiohttp

        # A whole shard may take long; silence on the line may not.
        silence = {"sock_read": options.timeout_seconds, "sock_connect": options.timeout_seconds}
        timeout = aiohttp.ClientTimeout(total=None, **silence)
        settings["client_kwargs"] = {"timeout": timeout, "trace_configs": [_stays_encrypted()]}
        settings["use_listings_cache"] = False
    try:
        return fsspec.get_filesystem_class(scheme)(**settings)
    except (
        ImportError,
        ValueError,
        TypeError,
    ) as error:  # a TypeError: it needs more than a URL says
        raise DataError(
            f"{root}: there is no driver for {scheme}:// ({error}); use https:// or s3://"
        ) from error
