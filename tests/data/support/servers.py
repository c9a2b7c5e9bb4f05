"""A small web server on loopback that serves a folder with ranges, with planned faults."""

import hashlib
import re
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class RangeServer(ThreadingHTTPServer):
    """Serves `folder`. Each GET first takes one of `faults`: a status, "hang", "cut", "whole", "garbage" or None.

    What lies below a key of `redirects` is answered by a redirect to the same path below its value.
    """

    daemon_threads = True

    def __init__(
        self, folder: Path, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__((host, 0), _Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.folder, self.host, self.scheme = folder, host, "http" if tls is None else "https"
        self.redirects: dict[str, str] = {}
        self.faults: deque[int | str | None] = deque()
        self.requests: list[tuple[str, str | None]] = []
        self.num_now = self.most_at_once = 0
        self.seconds_each = 0.0
        self.lock = threading.Lock()
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: RangeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = (
        True  # header and body go out in two writes, and the second would wait for 40 ms
    )

    def log_message(self, *_: object) -> None:
        """Silent."""

    def do_HEAD(self) -> None:
        self._respond(None, sends=False)

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.requests.append((self.path, self.headers["Range"]))
            self.server.num_now += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.num_now)
            fault = self.server.faults.popleft() if self.server.faults else None
        time.sleep(self.server.seconds_each)
        try:
            self._respond(fault)
        finally:
            with self.server.lock:
                self.server.num_now -= 1

    def _respond(self, fault: int | str | None, sends: bool = True) -> None:
        for start, target in self.server.redirects.items():
            if self.path.startswith(start):
                return self._answer(302, b"", Location=target + self.path.removeprefix(start))
        path = self.server.folder / self.path.lstrip("/")
        if fault == "hang":
            self.server.released.wait(30)
            self.close_connection = True
            return None
        if isinstance(fault, int) or not path.is_file():
            return self._answer(fault if isinstance(fault, int) else 404, b"")
        body = path.read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        if self.headers["If-Match"] not in (None, etag):
            return self._answer(412, b"")
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
        if span is None or fault == "whole":
            return self._answer(200, body, sends, ETag=etag)
        part = body[int(span[1]) : int(span[2]) + 1]
        if fault == "cut":
            self.close_connection = True
            return self._answer(206, part, part[: len(part) // 2])
        return self._answer(206 if part else 416, bytes(len(part)) if fault == "garbage" else part)

    def _answer(self, status: int, body: bytes, sent: bytes | bool = True, **headers: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(body)),
            "Accept-Ranges": "bytes",
            **headers,
        }.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body if sent is True else sent or b"")


@contextmanager
def range_server(
    folder: Path, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> Iterator[RangeServer]:
    server = RangeServer(folder, host, tls)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
