"""The HTTP server of a page: what it answers, to whom, and its threads.

Each request names the token in its path, and this machine as its host: a page of another site whose
name was pointed at 127.0.0.1 is refused. There is no way to change anything (a recording only
looks), and no CORS.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import socket
from contextlib import suppress
from functools import cache, partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from socketserver import TCPServer
from typing import Any, final
from urllib.parse import parse_qs

from gradwire.errors import UsageError
from gradwire.seeing.watcher import Watcher
from gradwire.threads import Spawn

MOST_CONNECTIONS = 64
_READ_SECONDS = 10.0
_FIRST_VIEW_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 2.0
_MOST_SECONDS = 10


@cache
def _html() -> bytes:
    return files("gradwire.seeing").joinpath("page.html").read_bytes()


@cache
def security_headers() -> dict[str, str]:
    """Headers of every answer. Only the page's own script and style run, known by their hashes."""
    text = _html().decode()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.S)
    policy = [
        "default-src 'none'",
        f"script-src '{_hash(script)}'",
        f"style-src '{_hash(style)}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@final
class PageServer(ThreadingHTTPServer):
    """Listens from the beginning, and answers from `start` on."""

    allow_reuse_address = True
    request_queue_size = 64
    watcher: Watcher

    def __init__(self, port: int, token: str) -> None:
        self.token, self.is_closed = token.encode(), False
        self.trace = b""
        """the latest recording, compressed"""
        try:
            super().__init__(("127.0.0.1", port), PageHandler)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"no page can be served on port {port}: {error}", hint="port=0 takes a free one"
            ) from error
        self.port: int = self.server_address[1]
        self.hosts = {f"127.0.0.1:{self.port}", f"localhost:{self.port}"}
        self._connections: set[socket.socket] = set()

    def start(self, watcher: Watcher, spawn: Spawn) -> None:
        """Answer requests about what this watcher knows."""
        self.watcher, self._spawn = watcher, spawn
        self._spawn("page", self._accept, None)

    def close(self) -> None:
        """Stop listening, and end what is being answered; the threads end soon."""
        self.is_closed = True
        for sock in (self.socket, *tuple(self._connections)):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def forked(self) -> None:
        """In a forked process: close its copies of the descriptors."""
        self.is_closed = True
        for sock in (self.socket, *tuple(self._connections)):
            sock.close()
        self._connections.clear()

    def _accept(self) -> None:
        while not self.is_closed:
            with suppress(OSError, ValueError):  # it was closed meanwhile
                self.handle_request()

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Answer one connection on a thread of its own, unless there are too many."""
        if len(self._connections) >= MOST_CONNECTIONS or self.is_closed:
            self.shutdown_request(request)
            return
        self._connections.add(request)
        try:
            self._spawn("page viewer", partial(self._answer, request, client_address), None)
        except RuntimeError:  # the system has no thread left
            self._connections.discard(request)
            self.shutdown_request(request)

    def _answer(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        try:
            with suppress(OSError):  # the viewer has gone
                self.finish_request(request, client_address)
        finally:
            self._connections.discard(request)
            self.shutdown_request(request)

    def server_bind(self) -> None:
        """Bind, without asking a name server for the name of this machine."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def server_close(self) -> None:
        """Close the listening socket; the threads were joined by the page."""
        self.socket.close()


@final
class PageHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: PageServer
    timeout = _READ_SECONDS

    def do_GET(self) -> None:
        """The page, its updates, the latest view, the stacks of one worker, or a recording."""
        path, _, query = self.path.partition("?")
        token, _, name = path.removeprefix("/").partition("/")
        host = self.headers.get_all("Host") or []
        is_here = len(host) == 1 and host[0].lower() in self.server.hosts
        if not hmac.compare_digest(token.encode(), self.server.token) or not is_here:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"not allowed\n")
        elif name == "":
            self._send(HTTPStatus.OK, "text/html", _html())
        elif name == "events":
            self._send_events()
        elif name == "status.json":
            view = self.server.watcher.latest(_FIRST_VIEW_SECONDS)
            known = HTTPStatus.OK if view else HTTPStatus.SERVICE_UNAVAILABLE
            self._send(known, "application/json", view)
        elif name == "stacks":
            worker = parse_qs(query).get("worker", [""])[0]
            text = self.server.watcher.stacks(worker)
            self._send(HTTPStatus.OK, "text/plain", text.encode())
        elif name == "record":
            self._record(parse_qs(query).get("seconds", [""])[0])
        elif name == "trace.json.gz" and self.server.trace:
            self._send(HTTPStatus.OK, "application/gzip", self.server.trace)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such page\n")

    def _record(self, asked: str) -> None:
        """Trace for some seconds; the answer is the text, and the file is there from then on."""
        seconds = int(asked) if asked.isdecimal() and len(asked) < 3 else 0
        if not 0 < seconds <= _MOST_SECONDS:
            text = f"seconds are between 1 and {_MOST_SECONDS}\n"
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", text.encode())
            return
        recorded = self.server.watcher.record(seconds)
        if recorded is None:
            self._send(HTTPStatus.CONFLICT, "text/plain", b"another recording is taken\n")
            return
        text, self.server.trace = recorded
        self._send(HTTPStatus.OK, "text/plain", text.encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self._begin(status, kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _begin(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        for name, value in security_headers().items():
            self.send_header(name, value)

    def _send_events(self) -> None:
        """Every view from now on, as server-sent events, until the viewer or the page is gone."""
        watcher, number = self.server.watcher, 0
        self._begin(HTTPStatus.OK, "text/event-stream")
        self.end_headers()
        with watcher.watching():
            while not watcher.is_closed:
                latest, view = watcher.view_after(number, _KEEP_ALIVE_SECONDS)
                # A comment finds out whether the viewer is still there.
                self.wfile.write(b"data: %b\n\n" % view if latest > number else b": wait\n\n")
                number = latest

    def version_string(self) -> str:
        """Of the server, without its version."""
        return "gradwire"

    def log_message(self, *_: object) -> None:
        """Nothing is logged: a request holds the token."""
