"""The page: what all workers are and do now, in a browser on this machine, for its user alone.

It listens on 127.0.0.1, and only who knows the token in its address sees anything: the token is in
a file that its user can read (jobs.py). It changes nothing, and loads nothing from elsewhere.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import final

from gradwire.current import current_worker
from gradwire.errors import UsageError
from gradwire.rpc.worker import Worker
from gradwire.seeing.jobs import JobPage, write_down
from gradwire.seeing.page_server import PageServer
from gradwire.seeing.watcher import Watcher
from gradwire.threads import Threads, call_after_fork

_JOIN_SECONDS = 5.0


@final
class Page:
    """The page of one worker; made by `serve_page`. It ends with the worker, or by `close()`."""

    def __init__(self, worker: Worker, port: int = 0) -> None:
        token = secrets.token_urlsafe(24)
        self._threads = Threads(f"gradwire {worker.name}")
        self._server = PageServer(port, token)
        self.url: str = f"http://127.0.0.1:{self._server.port}/{token}/"
        """its address, with the token: who knows it sees the page"""
        self._open, self._files = [None], list[Path]()
        self._watcher = Watcher(worker, self._threads)
        try:
            self._files += write_down(_job_page(worker, self.url))
            self._watcher.start()
            self._server.start(self._watcher, self._threads.spawn)
        except BaseException:
            self.close()
            raise
        worker.before_close.append(self.close)
        call_after_fork(self)

    def __repr__(self) -> str:
        return f"<Page on port {self._server.port}>"  # not the address: a log may show it

    def close(self) -> None:
        """Stop serving; idempotent. Viewers see that it has ended."""
        if not self._let_go():
            return
        for file in self._files:
            file.unlink(missing_ok=True)
        self._watcher.close()
        self._server.close()
        self._threads.join(_JOIN_SECONDS)
        self._server.server_close()

    @property
    def is_closed(self) -> bool:
        """Whether it shows nothing any more."""
        return not self._open

    def forked(self) -> None:
        """In a forked process: the page is its parent's."""
        self._open.clear()
        self._server.forked()

    def _let_go(self) -> bool:
        """Whether this is the first call: of two threads, one gets the item."""
        with suppress(IndexError):
            self._open.pop()
            return True
        return False


@final
class _Served:
    """The page that a worker serves, if any."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.page: Page | None = None
        self.lock = threading.RLock()

    def serve(self, port: int) -> Page:
        """The page; made if there is none, or it was closed."""
        with self.lock:
            if self.page is None or self.page.is_closed:
                self.page = Page(self.worker, port)
                _tell(self.page)
            return self.page


def serve_page(port: int = 0) -> Page:
    """Serve a page that shows live what all workers do: calls, bytes, and who waits for whom.

    The calling worker asks the others while somebody watches. The page is for a browser on this
    machine (port 0: any free one) and shows nothing to who does not know the token in its address,
    `url`. `gradwire page` opens it, and `gradwire top` shows the same in a terminal; both find it
    by a file that only you can read. It ends with the worker, or by `close()`.
    """
    worker: Worker = current_worker.find()
    if type(port) is not int or not 0 <= port < 1 << 16:
        raise UsageError(f"serve_page(port={port!r}) is not a port", hint="0 takes a free one")
    return worker.part(_Served).serve(port)


def _job_page(worker: Worker, url: str) -> JobPage:
    program, count = Path(sys.argv[0]).name if sys.argv else "", len(worker.directory.all())
    return JobPage(url, os.getpid(), os.getppid(), worker.name, program, count)


def _tell(page: Page) -> None:
    """Say where it is; the address is shown on a terminal only, as others may read a log."""
    where = page.url if sys.stderr.isatty() else f"`gradwire page {os.getpid()}` opens it"
    print(f"gradwire: a page shows what the workers do: {where}", file=sys.stderr)
