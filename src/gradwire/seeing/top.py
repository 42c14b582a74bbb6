"""`gradwire top`: what all workers of a running job do, as a table in the terminal.

It asks the page of the job, so it joins no world. Texts of workers are shown as they are, but for
control characters: what a peer has named must not write to the terminal.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import msgspec

from gradwire.errors import PeerLost, UsageError
from gradwire.seeing.history import View, WorkerRow
from gradwire.seeing.jobs import JobPage
from gradwire.seeing.waits import Wait

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

VIEWS = {"w": "workers", "a": "waits", "e": "edges", "f": "functions"}
"""the key of each view"""
_COLORS = {"runs": "green", "waits": "yellow", "idle": "dim", "silent": "bold red"}
_BLOCKS = {"r": "█", "w": "▄", "i": "▁", "s": "✕"}
_ASK_SECONDS = 10.0
_MOST_BYTES = 1 << 26


def latest_view(page: JobPage) -> View:
    """What the page shows now; PeerLost if it does not answer."""
    address = urlsplit(page.url)
    # Not urllib: it would ask a proxy that the environment names.
    connection = HTTPConnection(address.hostname or "", address.port or 80, timeout=_ASK_SECONDS)
    try:
        connection.request("GET", f"{address.path}status.json")
        answer = connection.getresponse()
        body = answer.read(_MOST_BYTES)
        if answer.status != 200:
            raise UsageError(f"the page refuses: {answer.status} {answer.reason}")
        return msgspec.json.decode(body, type=View)
    except (OSError, HTTPException, msgspec.DecodeError) as error:
        raise PeerLost(
            f"the page of process {page.pid} does not answer: {error}",
            hint="its worker has ended, or is stopped",
        ) from error
    finally:
        connection.close()


def show(page: JobPage, what: str, seconds: float, *, once: bool = False) -> None:
    """Show a view of the job until `q`, Ctrl-C or its end."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise UsageError(
            "gradwire top needs rich, which is not installed", hint="pip install 'gradwire[rich]'"
        ) from error
    if once:
        Console().print(picture(latest_view(page), what))
        return
    view = latest_view(page)
    with _keys() as key, Live(picture(view, what), screen=True, auto_refresh=False) as live:
        while True:
            pressed = key(seconds)
            if pressed in ("q", "\x03"):
                return
            what = VIEWS.get(pressed, what)
            if not pressed:
                view = latest_view(page)
            live.update(picture(view, what), refresh=True)


def picture(view: View, what: str = "workers") -> RenderableType:
    """What the terminal shows."""
    from rich.console import Group
    from rich.text import Text

    tables: dict[str, Callable[[View], Table]] = {
        "workers": _workers,
        "waits": _waits,
        "edges": _edges,
        "functions": _functions,
    }
    keys = "   ".join(f"{key} {name}" for key, name in VIEWS.items())
    head = f"{view.program}, process {view.pid}: {len(view.workers)} workers, seen from "
    return Group(
        Text(plain(f"{head}{view.worker}")),
        Text(plain(verdict(view)), style="bold red" if is_bad(view) else ""),
        tables[what](view),
        Text(f"{keys}   q quit", style="dim"),
    )


def is_bad(view: View) -> bool:
    """Whether a worker is silent, or workers wait for each other."""
    return bool(view.cycles) or any(row.silent is not None for row in view.workers)


def verdict(view: View) -> str:
    """The most important thing, in one line."""
    silent = [row.name for row in view.workers if row.silent is not None]
    if silent:
        is_due = set(silent).intersection
        waiting = sorted({w.worker for w in view.waits if is_due([w.peer, *w.ends_at])} - {*silent})
        also = f"; waiting for it: {', '.join(waiting)}" if waiting else ""
        return f"{', '.join(silent)}: no answer{also}"
    if view.cycles:
        return f"{' and '.join(view.cycles[0])} wait for each other"
    return f"all {len(view.workers)} workers answer"


def _workers(view: View) -> Table:
    counts = ">calls/s out", ">in", ">bytes/s out", ">in", ">in flight", ">serves"
    table = _table(
        "worker", "does", "last 5 s", *counts, "oldest wait", ">until", ">edges", ">memory"
    )
    oldest: dict[str, Wait] = {}
    for wait in view.waits:
        oldest.setdefault(wait.worker, wait)
    for row in view.workers:
        table.add_row(*_cells_of(row, oldest.get(row.name)), style=_COLORS.get(row.doing, ""))
    return table


def _cells_of(row: WorkerRow, wait: Wait | None) -> Sequence[RenderableType]:
    rates = row.rates
    life = f"{row.name} ({row.incarnation})" if row.incarnation else row.name
    return _texts(
        life,
        f"silent {spoken(row.silent)}" if row.silent is not None else row.doing,
        "".join(_BLOCKS.get(letter, " ") for letter in row.lane[-20:]),
        f"{rates.made:.1f}",
        f"{rates.served:.1f}",
        in_bytes(rates.sent),
        in_bytes(rates.received),
        row.in_flight,
        row.serves,
        row.why or (f"{spoken(wait.age)} for {wait.peer}: {_short(wait.what)}" if wait else ""),
        _until(wait.left) if wait else "",
        row.edges,
        in_bytes(row.rss),
    )


def _waits(view: View) -> Table:
    table = _table("who", "for whom", "what", ">since", ">until", "in the end for")
    for wait in view.waits:
        end = "a cycle" if wait.in_cycle else ", ".join(wait.ends_at)
        times = spoken(wait.age), _until(wait.left)
        cells = _texts(wait.worker, wait.peer, _short(wait.what), *times, end)
        table.add_row(*cells, style="bold red" if wait.in_cycle else "")
    return table


def _edges(view: View) -> Table:
    table = _table("worker", "edge", "held by", ">since", ">bytes", "sent at")
    for row in view.edges:
        cells = row.worker, row.edge, row.to, spoken(row.age), in_bytes(row.bytes), row.line
        table.add_row(*_texts(*cells))
    return table


def _functions(view: View) -> Table:
    table = _table("worker", "function", "for", ">since")
    for row in view.served:
        since = "queued" if row.age is None else spoken(row.age)
        table.add_row(*_texts(row.worker, _short(row.what), f"{row.peer}#{row.n}", since))
    return table


def _table(*columns: str) -> Table:
    """A table without rows; columns of numbers begin with `>`."""
    from rich.table import Table

    table = Table(expand=True, box=None, padding=(0, 1), header_style="dim")
    for name in columns:
        justify: Literal["left", "right"] = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=justify, no_wrap=True)
    return table


def _texts(*cells: object) -> list[RenderableType]:
    from rich.text import Text

    return [Text(plain(str(cell)), overflow="ellipsis") for cell in cells]


def _short(function: str) -> str:
    """The name of a function; of the script's own without the module."""
    return function.removeprefix("__main__.").removeprefix("__main__:")


def plain(text: str) -> str:
    """A text without control characters."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def spoken(seconds: float) -> str:
    """A duration."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _until(left: float | None) -> str:
    if left is None:
        return "no limit"
    return "over" if left < 0 else f"in {spoken(left)}"


def in_bytes(count: float) -> str:
    """A number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Read single keys inside the block, if there is a terminal; '' if none came in time."""
    if not sys.stdin.isatty():

        def sleep(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield sleep
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)

    def key(seconds: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""

    tty.setcbreak(sys.stdin)
    try:
        yield key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def listed(pages: Iterable[JobPage]) -> str:
    """The pages, a line each, without their addresses."""
    return "\n".join(
        plain(f"{page.pid}  {page.program}  {page.worker} of {page.workers}") for page in pages
    )
