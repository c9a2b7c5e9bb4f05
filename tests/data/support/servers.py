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

    def __init__(self, folder: Path, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
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
    disable_nagle_algorithm = True  # header and body go out in two writes, and the second would wait for 40 ms

    def log_message(self, *_: object) -> None:
        """Silent."""

    def _redirected(self) -> bool:
        for start, target in self.server.redirects.items():
            if self.path.startswith(start):
                self.send_response(302)
                self.send_header("Location", target + self.path.removeprefix(start))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return True
        return False

    def do_HEAD(self) -> None:
        if self._redirected():
            return
        path = self.server.folder / self.path.lstrip("/")
        if not path.is_file():
            self._answer(404, b"", send=False)
            return
        self._answer(200, path.read_bytes(), send=False, etag=_etag(path.read_bytes()))

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.requests.append((self.path, self.headers["Range"]))
            self.server.num_now += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.num_now)
            fault = self.server.faults.popleft() if self.server.faults else None
        time.sleep(self.server.seconds_each)
        try:
            if not self._redirected():
                self._get(fault)
        finally:
            with self.server.lock:
                self.server.num_now -= 1

    def _get(self, fault: int | str | None) -> None:
        path = self.server.folder / self.path.lstrip("/")
        if fault == "hang":
            self.server.released.wait(30)
            self.close_connection = True
            return
        if isinstance(fault, int):
            self._answer(fault, b"planned")
            return
        if not path.is_file():
            self._answer(404, b"")
            return
        body = path.read_bytes()
        if self.headers["If-Match"] not in (None, _etag(body)):
            self._answer(412, b"")
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
        if span is None or fault == "whole":
            self._answer(200, body, etag=_etag(body))
            return
        part = body[int(span[1]) : int(span[2]) + 1]
        if not part:
            self._answer(416, b"")
        elif fault == "cut":
            self._answer(206, part, missing=len(part) // 2)
        else:
            self._answer(206, bytes(len(part)) if fault == "garbage" else part)

    def _answer(self, status: int, body: bytes, *, send: bool = True, missing: int = 0, etag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "bytes")
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        if send:
            self.wfile.write(body[: len(body) - missing])
        self.close_connection = missing > 0


def _etag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:16]}"'


@contextmanager
def range_server(folder: Path, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Iterator[RangeServer]:
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
