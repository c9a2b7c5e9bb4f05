"""Reads shards over the network: range requests through fsspec, with timeouts and retries.

The server of the shards sees which examples are requested, and so the members of every batch: it
must be inside the trust boundary (docs/data.md). A final failure is a ReadError, which ends the run
before the step is charged; it never becomes a zero gradient.
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
"""Drivers' names of the properties that change with an object, and ours."""
_QUERY = re.compile(r"\?[^\s'\"]*")
"""The query of an address, which may hold a signature."""
_GONE = "it is gone"
_REFUSED = "access is refused"
_FINAL = {
    401: _REFUSED,
    403: _REFUSED,
    404: _GONE,
    410: _GONE,
    412: "it changed since it was indexed (ETag)",
    416: "it is shorter than its index says",
}
"""HTTP statuses that another try would not change."""


class RemoteStorage:
    """Reads shards over the network; see `data.reading.storage.Storage`.

    Another process (after a fork or by pickle) opens its own connections.
    """

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
                f"{root} is not encrypted: the network sees the requests, and so the members of "
                "every batch; use https, or set data.remote.allow_plain_http = true if it may"
            )
        self._is_http = parts.scheme in ("http", "https")
        self._filesystem = _filesystem(root, options)
        self._threads: ThreadPoolExecutor | None = None
        self._owner = os.getpid()

    def status(self, names: Sequence[str]) -> Iterator[ShardStatus | DataError]:
        return self._ahead(names, self._status, lambda _name: 0)

    def fetch(self, name: str, status: ShardStatus, path: Path) -> None:
        url = f"{self.root}/{name}"

        def fetch_shard() -> None:
            self._filesystem.get_file(url, str(path), **self._if_match(status.version))
            size = path.stat().st_size
            if size != status.size:
                raise ReadError(f"the server sent {size} of {status.size} bytes")

        self._retry(url, fetch_shard)

    def read_all(self, requests: Sequence[ReadRequest]) -> Iterator[bytes]:
        def read(request: ReadRequest) -> bytes:
            url = f"{self.root}/{request.shard.name}"
            return self._retry(url, lambda: fetch(url, request))

        def fetch(url: str, request: ReadRequest) -> bytes:
            start = request.offset
            end = request.offset + request.length
            settings = self._if_match(request.shard.version) | self._timeout()
            extent: bytes = self._filesystem.cat_file(url, start=start, end=end, **settings)
            if len(extent) > request.length:
                raise _FinalError(f"cannot read {url}: its server does not serve ranges")
            if len(extent) < request.length:
                raise ReadError(f"{len(extent)} of {request.length} bytes at byte {request.offset}")
            return check_crc(request, extent, url)

        return self._ahead(requests, read, lambda request: request.length)

    def close(self) -> None:
        threads = self._threads
        self._threads = None
        if threads is not None and self._owner == os.getpid():
            threads.shutdown(wait=False, cancel_futures=True)

    def _ahead(
        self, inputs: Sequence[Any], function: Callable[[Any], T], size: Callable[[Any], int]
    ) -> Iterator[T]:
        """Yields function(input) of all inputs in order, called ahead in threads.

        Limits are one call per connection at a time, two results per connection, and
        _MAX_BYTES_AHEAD bytes of results.

        Args:
            size: bytes of the result of an input.
        """
        if self._threads is None or self._owner != os.getpid():
            self._threads = ThreadPoolExecutor(self._options.connections, "shards")
            self._owner = os.getpid()
        threads = self._threads
        pending: deque[tuple[Future[T], int]] = deque()
        pending_bytes = 0
        try:
            for input_ in inputs:
                while pending and (
                    len(pending) >= 2 * self._options.connections
                    or pending_bytes + size(input_) > _MAX_BYTES_AHEAD
                ):
                    future, num_bytes = pending.popleft()
                    pending_bytes -= num_bytes
                    yield future.result()
                future = threads.submit(function, input_)
                pending.append((future, size(input_)))
                pending_bytes += size(input_)
            while pending:
                future, _ = pending.popleft()
                yield future.result()
        finally:
            for future, _ in pending:
                future.cancel()

    def _status(self, name: str) -> ShardStatus | DataError:
        url = f"{self.root}/{name}"
        timeout = self._timeout()
        try:
            properties = self._retry(url, lambda: self._filesystem.info(url, **timeout))
        except ReadError as error:
            if _final_reason(error.__cause__) == _GONE:
                return DataError(f"missing or empty shards: {error}")
            raise
        if properties.get("partial") is False:
            return DataError(f"{url}: its server does not serve ranges; use one that does")
        size = properties.get("size")
        if not size:
            return DataError(
                f"missing or empty shards: {url} is empty, or its server does not tell its size"
            )
        version = ""
        for key, kind in _VERSIONS.items():
            if properties.get(key):
                version = f"{kind}:{properties[key]}"
                break
        return ShardStatus(int(size), version)

    def _timeout(self) -> dict[str, Any]:
        # fsspec's synchronous calls of asynchronous drivers take it; other drivers have their own.
        if isinstance(self._filesystem, AsyncFileSystem):
            return {"timeout": self._options.timeout_seconds}
        return {}

    def _if_match(self, version: str) -> dict[str, Any]:
        """Returns settings by which the server refuses a file of another version.

        Only a strong ETag allows that (RFC 9110, 13.1.1).
        """
        if not self._is_http:
            return {}
        headers = {"Accept-Encoding": "identity"}
        if version.startswith('etag:"'):
            headers["If-Match"] = version.removeprefix("etag:")
        return {"headers": headers}

    def _retry(self, url: str, call: Callable[[], T]) -> T:
        """Returns the result of the call; retries it with doubling pauses until a final answer.

        Raises:
            ReadError: the answer is final, or the last try failed too.
        """
        pause = self._options.backoff_seconds
        for number in range(1, self._options.tries + 1):
            try:
                return call()
            except _FinalError:
                raise
            # Drivers raise exceptions of their own libraries.
            except Exception as error:
                reason = _final_reason(error)
                if reason:
                    raise ReadError(f"cannot read {url}: {reason}") from error
                if number == self._options.tries:
                    if isinstance(error, ReadError):
                        problem = str(error)
                    else:
                        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
                        first_line, _, _ = str(cause).partition("\n")
                        # The query of an address may hold a signature.
                        public_text = _QUERY.sub("", first_line)[:200]
                        problem = f"{type(cause).__name__} {public_text}".strip()
                    raise ReadError(f"cannot read {url} in {number} tries: {problem}") from error
            time.sleep(min(pause, _LONGEST_PAUSE_SECONDS) * random.uniform(0.5, 1.0))
            pause *= 2
        raise AssertionError("tries is at least 1")


class _FinalError(ReadError):
    """An answer that another try would not change."""


class _RefusedRedirectError(Exception):
    """A redirect that is not followed; its text gives the reason."""


def _final_reason(error: BaseException | None) -> str | None:
    """Returns the reason why another try would fail too, or None if it may succeed."""
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
def _encrypted_redirects() -> "TraceConfig":
    """Returns a rule that refuses redirects from https to http before they are followed.

    Over http the network would see the members of every batch.
    """
    import aiohttp

    # aiohttp itself reads the next address with it.
    from yarl import URL

    async def check(
        _session: object, _context: object, redirect: "TraceRequestRedirectParams"
    ) -> None:
        headers = redirect.response.headers
        address = headers.get("Location") or headers.get("URI") or ""
        target = redirect.url.join(URL(address))
        if redirect.url.scheme == "https" and target.scheme != "https":
            redirect.response.close()
            # The rest of the address may hold a signature.
            place = f"{target.scheme}://{target.host}"
            raise _RefusedRedirectError(
                f"it redirects to {place}, which is not encrypted; give an address that leads over "
                "https all the way"
            )

    rule = aiohttp.TraceConfig()
    rule.on_request_redirect.append(check)
    return rule


def _filesystem(root: str, options: RemoteOptions) -> Any:
    """Returns fsspec's driver for a scheme, which takes credentials from its own environment."""
    scheme = urlsplit(root).scheme
    settings: dict[str, Any] = {}
    if scheme in ("http", "https"):
        import aiohttp

        # A whole shard may take long; silence on the line may not.
        seconds = options.timeout_seconds
        timeout = aiohttp.ClientTimeout(total=None, sock_read=seconds, sock_connect=seconds)
        trace_configs = [_encrypted_redirects()]
        settings["client_kwargs"] = {"timeout": timeout, "trace_configs": trace_configs}
        settings["use_listings_cache"] = False
    try:
        return fsspec.get_filesystem_class(scheme)(**settings)
    # A driver that needs more arguments than a URL gives raises a TypeError.
    except (ImportError, ValueError, TypeError) as error:
        raise DataError(
            f"{root}: there is no driver for {scheme}:// ({error}); use https:// or s3://"
        ) from error
