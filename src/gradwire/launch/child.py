"""The main function of a process started by `run`: join, call the function or serve it, leave.

It reports its progress to the parent through a pipe, in single words; longer data goes through
files in the run's directory, which is private, so that even a killed worker leaves nothing behind.

Parent and children exchange pickles, unlike workers among each other: only their user can access
the pipe and the directory. Plain pickle is used, as multiprocessing's would move tensors to shared
memory, which cannot be read once the sender is gone.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import msgspec

from gradwire import threads
from gradwire.agent.remote_errors import describe
from gradwire.current import current_worker
from gradwire.errors import DeadlinePassed, UsageError
from gradwire.launch.named_output import named_output
from gradwire.launch.received import Receiver, receive
from gradwire.launch.supervise_state import CALLER
from gradwire.options import FOREVER, Options
from gradwire.rpc.api import Names, default_name, init_rpc, shutdown
from gradwire.rpc.codec.pickle_codec import dumps, loads
from gradwire.rpc.expose.registry import exception_name
from gradwire.rpc.worker import Worker
from gradwire.seeing.page import serve_page
from gradwire.seeing.trace import traced_if_asked

_log = logging.getLogger("gradwire")

BEGUN, PREPARED, JOINED = "begun", "prepared", "joined"
RETURNED, FAILED, LEFT = "returned", "failed", "left"
ARGUMENTS = "arguments"  # the file with the function, its arguments, and what is exposed
SECRET = "secret"  # the file with the secret of the run, unless its options name one
_LOOK_AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that one worker process needs to know."""

    name: str
    rank: int
    world_size: int
    options: Options
    directory: Path
    may_restart: bool = False
    """whether workers that die are restarted"""
    page: bool = False
    """whether the worker that runs the function serves a page"""
    gets_code: bool = False
    """whether the parent sends it functions and classes; see launch/received.py"""

    @property
    def returned(self) -> Path:
        """The file with the return value of the function."""
        return self.directory / "returned"

    @property
    def failure(self) -> Path:
        """The file with the error of this worker."""
        return self.directory / f"{self.name}.failure"


def worker_specs(
    world_size: int,
    options: Options,
    directory: Path,
    may_restart: bool = False,
    names: Names | None = None,
    page: bool = False,
) -> list[WorkerSpec]:
    """The specifications of the workers of one run."""
    shared = replace(
        options,
        init_method=f"file://{directory / 'rendezvous'}",
        secret=options.secret or str(directory / SECRET),
    )
    specs = []
    for rank in range(world_size):
        own = _socket(directory, rank) if options.listen in ("auto", "unix") else options.listen
        own_options = replace(shared, listen=own)
        name = (names or default_name)(rank)
        how = may_restart, page and rank == CALLER
        specs.append(WorkerSpec(name, rank, world_size, own_options, directory, *how))
    return specs


def restarted(spec: WorkerSpec) -> WorkerSpec:
    """The specification of a worker's next incarnation.

    Its socket has a new name: a peer that still connects to the old incarnation must not reach it.
    """
    listen, incarnation = spec.options.listen, spec.options.incarnation + 1
    if listen.startswith(f"unix://{spec.directory}"):
        listen = _socket(spec.directory, spec.rank, f".{incarnation}")
    return replace(spec, options=replace(spec.options, incarnation=incarnation, listen=listen))


def _socket(directory: Path, rank: int, suffix: str = "") -> str:
    return f"unix://{directory / f'w{rank}{suffix}.socket'}"


def main(pipe: Connection, parent: int, spec: WorkerSpec) -> None:
    """Run one worker, from start to exit."""
    heard: SimpleQueue[bytes] = SimpleQueue()
    prepare(pipe, parent, spec.directory, heard.put)
    pipe.send_bytes(BEGUN.encode())
    me = os.getpid()
    try:
        with named_output(spec.name, spec.rank, spec.options.output):
            _work(pipe, spec, heard)
    except BaseException as error:  # reported to the parent, whatever it is
        if os.getpid() != me:  # a process that the function has forked: not a worker
            raise
        threads.flush_output()
        failure = describe(error, spec.name, exception_name)
        spec.failure.write_bytes(msgspec.msgpack.encode(failure))
        pipe.send_bytes(FAILED.encode())
        sys.exit(1)
    threads.flush_output()
    pipe.send_bytes(LEFT.encode())


def prepare(
    pipe: Connection,
    parent: int,
    directory: Path | None = None,
    heard: Callable[[bytes], None] = lambda _: None,
) -> None:
    """Watch the parent, ignore Ctrl-C, and flush output after each line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which `ProcessGroup` has blocked
    watch = partial(_end_with_parent, pipe, parent, directory, heard)
    threads.thread(name="gradwire parent watch", target=watch).start()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _work(pipe: Connection, spec: WorkerSpec, heard: SimpleQueue[bytes]) -> None:
    fn, args, expose = unpickled(
        (spec.directory / ARGUMENTS).read_bytes(),
        "what run() was given",
        hint="fn, args and expose must come from the script or from modules that a new process can "
        "import, not from a notebook or a prompt",
    )
    if spec.gets_code:
        pipe.send_bytes(PREPARED.encode())
    init_rpc(spec.name, spec.rank, spec.world_size, spec.options, expose=expose)
    worker = cast(Worker, current_worker.find())
    if spec.gets_code:
        target = partial(receive, heard, Receiver(worker, spec.directory), partial(_say, pipe))
        threads.thread(name="gradwire definitions", target=target).start()
    pipe.send_bytes(JOINED.encode())
    if not gc.get_freeze_count():  # else this is a fork of a process that has done it
        # torch has made 170 000 objects, which every full collection would visit: 0.1 s for each,
        # in a burst of calls one for every 4 000 of them.
        gc.freeze()
        atexit.register(gc.unfreeze)  # the last collection closes files, and so writes to them
    if spec.rank != CALLER:
        # Serve until the function has returned, even if w0 dies and is restarted. A worker that is
        # restarted after all others left finds the file with the value.
        is_over = not spec.may_restart
        while not is_over:
            is_over = worker.serve_until_over(CALLER, _LOOK_AGAIN_SECONDS) or spec.returned.exists()
        shutdown(timeout=FOREVER)  # the parent gives up sooner
        return
    _call(pipe, spec, partial(fn, *args))


def _call(pipe: Connection, spec: WorkerSpec, fn: Callable[[], object]) -> None:
    """Call the function of the run, unless an earlier incarnation has; then leave."""
    if not spec.returned.exists():
        me = os.getpid()
        if spec.page:
            serve_page()
        with traced_if_asked():
            value = fn()
        if os.getpid() != me:  # a process that it has forked: its value is not that of the run
            sys.exit(0)
        what = f"what the function returned (a {type(value).__name__})"
        hint = "return plain values and tensors; references end with their workers"
        draft = spec.returned.with_suffix(".draft")
        draft.write_bytes(pickled(value, what, hint=hint))
        draft.replace(spec.returned)  # atomically: once it exists, the function is not called again
    pipe.send_bytes(RETURNED.encode())
    if current_worker.maybe_default() is None:  # the function called shutdown()
        return
    try:
        shutdown()
    except DeadlinePassed as error:
        # The parent judges the worker that does not leave: its process may have died, or may still
        # end in the time that the parent allows, which is longer.
        _log.warning("%s", error.message)


def _say(pipe: Connection, word: str) -> None:
    with suppress(OSError):  # the parent is gone, and soon this process
        pipe.send_bytes(word.encode())


def _end_with_parent(
    pipe: Connection, parent: int, directory: Path | None, heard: Callable[[bytes], None]
) -> None:
    """End this process when its parent ends, and remove the directory.

    The end of the pipe tells. A process forked by the parent may hold a copy of its end, so the
    parent's process id is polled too. What the parent says through the pipe goes to `heard`.

    A fork's parent is its server. If only that has ended, others still need the directory.
    """
    program, is_over = multiprocessing.parent_process(), True
    with suppress(EOFError, OSError):
        while os.getppid() == parent:
            if pipe.poll(_LOOK_AGAIN_SECONDS):
                heard(pipe.recv_bytes())
        is_over = program is None or program.pid == parent or pipe.poll()
    if directory is not None and is_over:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def pickled(value: object, what: str, *, hint: str | None = None) -> bytes:
    """Pickle an object; `what` names it in the error."""
    try:
        return dumps(value)
    except Exception as error:  # __reduce__ may raise anything
        raise UsageError(f"{what} cannot be pickled: {error}", hint=hint) from error


def unpickled(data: bytes, what: str, *, hint: str | None = None) -> Any:  # noqa: ANN401
    """Unpickle an object; `what` names it in the error."""
    try:
        return loads(data)
    except Exception as error:
        raise UsageError(f"{what} cannot be unpickled here: {error}", hint=hint) from error
