"""What a process that `run` started does: join, run the function or serve it, leave.

It tells its parent how far it is in single words; what is longer lies in files of the run's
directory.
"""

from __future__ import annotations

import io
import logging
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import cast

import msgspec

from gradwire.agent.remote_errors import describe
from gradwire.current import current_worker
from gradwire.errors import DeadlinePassed
from gradwire.launch.parent_watch import end_with_parent
from gradwire.launch.pickled_arguments import packed, unpacked
from gradwire.launch.plan import Orders, given_in
from gradwire.launch.processes import ignore_interrupts
from gradwire.launch.supervise_state import CALLER
from gradwire.rpc.api import init_rpc, shutdown
from gradwire.rpc.expose.registry import exception_name
from gradwire.rpc.worker import Worker

_log = logging.getLogger("gradwire")

BEGUN, RETURNED, FAILED, LEFT = "begun", "returned", "failed", "left"

_LOOK_AGAIN_SECONDS = 1.0
AS_LONG_AS_IT_TAKES = 10 * 365 * 86400.0
"""How long a worker that only serves waits for the others. The parent's patience ends sooner."""


def main(line: Connection, parent: int, orders: Orders) -> None:
    """The life of one worker."""
    prepare(line, parent, orders)
    line.send_bytes(BEGUN.encode())
    try:
        _work(line, orders)
    except BaseException as error:  # whatever it is, the parent must be told
        flush_output()
        failure = describe(error, orders.name, exception_name)
        orders.failure.write_bytes(msgspec.msgpack.encode(failure))
        line.send_bytes(FAILED.encode())
        sys.exit(1)
    flush_output()
    line.send_bytes(LEFT.encode())


def prepare(line: Connection, parent: int, orders: Orders | None = None) -> None:
    """Make this process one that ends with its parent and shows what it prints line by line."""
    ignore_interrupts()
    end_with_parent(line, parent, None if orders is None else orders.directory)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def flush_output() -> None:
    """What was printed without a line's end."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(ValueError, OSError):  # it was closed, or nobody reads it any more
                stream.flush()


def _work(line: Connection, orders: Orders) -> None:
    fn, args, expose = unpacked(
        given_in(orders.directory).read_bytes(),
        "what run() was given",
        hint="fn, args and expose must come from the script or from modules that a new process can "
        "import; what a notebook or a prompt defines cannot be found",
    )
    init_rpc(orders.name, orders.rank, orders.world_size, orders.options, expose=expose)
    if not orders.is_caller:
        if orders.comes_back:
            _serve_all_lives(orders)
        shutdown(timeout=AS_LONG_AS_IT_TAKES)
        return
    if not orders.returned.exists():  # or an earlier life has died on its way out
        _write_returned(orders, fn(*args))
    line.send_bytes(RETURNED.encode())
    if current_worker.maybe_default() is not None:  # unless the function itself has left
        _leave_after_the_function()


def _leave_after_the_function() -> None:
    """The value is there. Of a worker that does not leave in time the parent knows more than we.

    Its process may have died, which the parent has seen and judged, or it may end later than this
    worker waits, but in the time that the parent gives it.
    """
    try:
        shutdown()
    except DeadlinePassed as error:
        _log.warning("%s", error.message)


def _serve_all_lives(orders: Orders) -> None:
    """Until the function has returned, also if the worker that runs it dies and comes back.

    One that itself comes back when all others have left is told so by nobody: it finds the value.
    """
    worker = cast(Worker, current_worker.find())
    while not worker.serve_until_over(CALLER, _LOOK_AGAIN_SECONDS):
        if orders.returned.exists():
            return


def _write_returned(orders: Orders, value: object) -> None:
    """In one go: once it is there, no later life calls the function again."""
    hint = "return plain values and tensors; references live only as long as their workers"
    what = f"what the function returned (a {type(value).__name__})"
    draft = orders.returned.with_suffix(".draft")
    draft.write_bytes(packed(value, what, hint=hint))
    draft.replace(orders.returned)
