"""A process that has imported torch and gradwire, and whose forks become the workers of a run.

The import takes over a second of a core, a fork a few milliseconds. The server is a new process,
not a fork of the program: it starts no threads and initializes no device, so its forks may do both.
A fork does what a spawned process would do: it imports the program and calls its main function.

The program and the server talk through a socket that keeps messages apart. The program sends the
worker's end of a pipe, the server answers with a descriptor of the new process (pidfd) and later
with its exit status. When the program ends, its workers end; the server kills what is left.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import io
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from multiprocessing import process, resource_tracker, spawn
from multiprocessing.connection import Connection
from struct import Struct
from typing import Any, NoReturn, cast, final

from gradwire.current import current_worker
from gradwire.errors import DeadlinePassed, GradwireError
from gradwire.rpc.codec.pickle_codec import dumps, loads
from gradwire.threads import leave_fork

# Only numpy's linear algebra may have threads: it stops them itself around a fork.
_PROGRAM = """
import gc, os, sys
gc.disable()
sys.path[:] = {path!r}
others = len(os.listdir("/proc/self/task")) - 1
import numpy
threads = len(os.listdir("/proc/self/task")) - others
from gradwire.launch.fork_server import main
main({socket}, {program}, {tracker}, threads)
"""
_OF_MAIN = ("init_main_from_name", "init_main_from_path")
_END_SECONDS = 5.0
_STATUS_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 1.0
_LEAVE_SECONDS = 2.0
_UNKNOWN_STATUS = 255
"""of a process that ended after its server did"""


class _News(IntEnum):
    READY = 0
    UNSAFE = 1
    """its forks might not work: something that it imported has started a thread, or uses a GPU"""
    STARTED = 2
    FAILED = 3
    EXITED = 4


_MESSAGE = Struct("<Bii")
"""what happened; a process id; the exit status, or what the system said"""


class CannotFork(GradwireError):
    """There is no server whose forks could be workers."""


@contextmanager
def no_interrupt_from_terminal() -> Iterator[None]:
    """For the start of a process. Ctrl-C goes to all, and one that imports would print an error."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- the program's side


@final
class ForkedProcess:
    """A worker process that the server has forked; as far as it is used, `SpawnProcess`."""

    def __init__(self, name: str, pid: int, pidfd: int, server: ForkServer) -> None:
        self.name, self.pid, self.sentinel = name, pid, pidfd
        """`sentinel` becomes readable when the process ends"""
        self._server, self._status = server, cast("int | None", None)

    @property
    def exitcode(self) -> int | None:
        """The exit status, or minus the number of a signal; None while the process runs."""
        if self._status is None and _is_readable(self.sentinel, 0):
            self._status = self._server.status_of(self.pid)
        return self._status

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended; its id may be another's by now
            signal.pidfd_send_signal(self.sentinel, number)

    def join(self, seconds: float) -> None:
        """Wait for the end, at most so long."""
        _is_readable(self.sentinel, seconds)

    def close(self) -> None:
        """Let go of the descriptor."""
        os.close(self.sentinel)


@final
class ForkServer:
    """The program's end of a fork server."""

    def __init__(self, start_seconds: float, waiting: Callable[[], None] = lambda: None) -> None:
        """Start it and wait until it has imported what it needs; CannotFork if it is of no use.

        `waiting` is called now and then meanwhile.
        """
        try:
            os.close(os.pidfd_open(os.getpid()))
        except (AttributeError, OSError) as error:
            raise CannotFork(f"the system has no descriptors of processes: {error}") from error
        self._statuses: dict[int, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._start(theirs.fileno())
            deadline = time.monotonic() + start_seconds
            while (left := deadline - time.monotonic()) > 0:
                if _is_readable(self._socket.fileno(), min(left, _LOOK_AGAIN_SECONDS)):
                    break
                waiting()
            news, _, _, _ = self._next(deadline, "import torch")
            if news is not _News.READY:
                raise CannotFork("something that the server imports has started threads or a GPU")
        except BaseException:
            self.stop()
            raise

    def _start(self, theirs: int) -> None:
        tracker = cast(int, cast(Any, resource_tracker).getfd())  # starts it, if need be
        path = [place for place in sys.path if isinstance(place, str)]  # Python ignores others
        command = _PROGRAM.format(path=path, socket=theirs, program=os.getpid(), tracker=tracker)
        flags = cast(Any, subprocess)._args_from_interpreter_flags()
        with no_interrupt_from_terminal():  # until `stop` knows the process
            self._process = subprocess.Popen(
                [spawn.get_executable(), *flags, "-c", command],
                pass_fds=[theirs, tracker],
                stdin=subprocess.DEVNULL,
            )

    def fork(self, name: str, pipe: Connection, seconds: float) -> ForkedProcess:
        """A new process, which reads what it is to do from its end of the pipe (`told`)."""
        deadline = time.monotonic() + seconds
        try:
            socket.send_fds(self._socket, [b"\0"], [pipe.fileno()])
        except OSError as error:
            raise CannotFork(f"the server of forks is gone: {error}") from error
        while True:
            news, pid, detail, pidfd = self._next(deadline, f"fork {name}")
            if news is _News.STARTED and pidfd < 0:  # the system had no place for it
                raise OSError(errno.EMFILE, f"{name} was forked: {os.strerror(errno.EMFILE)}")
            if news is _News.STARTED:
                return ForkedProcess(name, pid, pidfd, self)
            if news is _News.FAILED:
                raise OSError(detail, f"{name} could not be forked: {os.strerror(detail)}")

    def status_of(self, pid: int) -> int:
        """The exit status of a process that has ended."""
        deadline = time.monotonic() + _STATUS_SECONDS
        while pid not in self._statuses:
            try:
                self._next(deadline, f"tell how process {pid} ended")
            except GradwireError:
                return _UNKNOWN_STATUS
        return self._statuses.pop(pid)

    def stop(self) -> None:
        """End the server, and with it every process that it has forked. Idempotent."""
        self._socket.close()
        if self._process is None:
            return
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        finally:  # it is late, or this is interrupted by a second Ctrl-C
            self._process.kill()
            self._process.wait()

    def _next(self, deadline: float, what: str) -> tuple[_News, int, int, int]:
        """The next message, with the descriptor in it or -1; takes note of exit statuses."""
        if not _is_readable(self._socket.fileno(), deadline - time.monotonic()):
            raise DeadlinePassed(f"the server of forks did not {what} in time")
        data, descriptors, _, _ = socket.recv_fds(self._socket, _MESSAGE.size, 1)
        if not data:
            raise CannotFork(f"the server of forks ended before it could {what}")
        kind, pid, detail = _MESSAGE.unpack(data)
        if kind == _News.EXITED:
            self._statuses[pid] = detail
        return _News(kind), pid, detail, descriptors[0] if descriptors else -1


def told(
    name: str, main: Callable[..., None], args: tuple[object, ...], *, imports_main: bool = True
) -> bytes:
    """What a fork reads first: how to be a process of this program, and what to call."""
    data = spawn.get_preparation_data(name)
    for key in () if imports_main else _OF_MAIN:
        data.pop(key, None)
    data["authkey"] = bytes(data["authkey"])  # its own class refuses to be pickled
    program = multiprocessing.current_process().name, os.getpid()
    return dumps((program, data, dumps((main, args))))


def _is_readable(descriptor: int, seconds: float) -> bool:
    return bool(_ready([descriptor], seconds))


def is_writable(descriptor: int) -> bool:
    """Whether there is room for a short message."""
    room = select.poll()
    room.register(descriptor, select.POLLOUT)
    return bool(room.poll(0))


def _ready(descriptors: Iterable[int], seconds: float) -> list[int]:
    """Those that can be read, after a wait for the first of them."""
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in waiting.poll(max(0.0, seconds) * 1000)]


# -- the server


def main(descriptor: int, program: int, tracker: int, threads: int) -> None:
    """Serve until the program ends; in a fork, be a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program ends its workers
    # One tracker for all: a worker's own would delete shared memory that other workers made.
    os.set_inheritable(tracker, False)
    cast(Any, resource_tracker)._resource_tracker._fd = tracker
    gc.freeze()  # the collector would write to pages that the forks share
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the program may ignore it, and so would this
    server = os.getpid()
    with socket.socket(fileno=descriptor) as channel:
        news = _News.READY if _may_fork(threads) else _News.UNSAFE
        pipe = None
        with suppress(BrokenPipeError, ConnectionResetError):  # the program is gone
            channel.send(_MESSAGE.pack(news, 0, 0))
            pipe = _Server(channel, program).serve()
    if pipe is not None:
        _be_worker(pipe, server)


def _may_fork(threads: int) -> bool:
    torch = sys.modules["torch"]
    return len(os.listdir("/proc/self/task")) <= threads and not torch.cuda.is_initialized()


@final
class _Server:
    def __init__(self, channel: socket.socket, program: int) -> None:
        self._channel, self._program = channel, program
        self._pids: dict[int, int] = {}
        """by the descriptor of the process"""

    def serve(self) -> Connection | None:
        """Fork as often as asked; returns None at the end, and in each fork its pipe."""
        try:
            # A process that the program has forked may hold a copy of its end of the channel.
            while os.getppid() == self._program:
                descriptors = (self._channel.fileno(), *self._pids)
                for descriptor in _ready(descriptors, _LOOK_AGAIN_SECONDS):
                    if descriptor in self._pids:
                        self._reap(descriptor)
                    elif (pipe := self._asked()) is not None:
                        self._pids.clear()
                        return pipe
        except EOFError:
            pass
        finally:
            self._end_all()
        return None

    def _end_all(self) -> None:
        """Workers notice by themselves that the program is gone, and remove what is on the disk."""
        until = time.monotonic() + _LEAVE_SECONDS
        while self._pids and (left := until - time.monotonic()) > 0:
            for descriptor in _ready(self._pids, left):
                self._pids.pop(descriptor)
        for pidfd in self._pids:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _asked(self) -> Connection | None:
        """Fork; returns the pipe in the new process, and None here."""
        data, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        if not data:
            raise EOFError
        try:
            pid = os.fork()
        except OSError as error:
            os.close(descriptors[0])
            self._channel.send(_MESSAGE.pack(_News.FAILED, 0, error.errno or 0))
            return None
        if pid == 0:
            for other in self._pids:
                os.close(other)
            return Connection(descriptors[0])
        os.close(descriptors[0])
        pidfd = os.pidfd_open(pid)  # it is not reaped before: the id is still its own
        self._pids[pidfd] = pid
        socket.send_fds(self._channel, [_MESSAGE.pack(_News.STARTED, pid, 0)], [pidfd])
        return None

    def _reap(self, pidfd: int) -> None:
        pid = self._pids.pop(pidfd)
        os.close(pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._channel.send(_MESSAGE.pack(_News.EXITED, pid, status))


def _be_worker(pipe: Connection, server: int) -> NoReturn:
    """What `multiprocessing.spawn` does in a new process, as far as a fork has to."""
    failed: BaseException | None = None
    try:
        about = pipe.recv_bytes()
    except (EOFError, OSError):  # the program was interrupted
        os._exit(1)
    try:
        main, args = _become(pipe, *loads(about))
        main(pipe, server, *args)
    except SystemExit as error:
        failed = error
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # before it waits for threads
        failed = SystemExit(1)
    cast(Any, threading)._shutdown()  # not only joins threads: it ends those of idle executors
    cast(Any, atexit)._run_exitfuncs()
    _flush_files()
    leave_fork(failed)


def _flush_files() -> None:
    """Write what is in the buffers of files that the program has not closed, as Python does.

    Python would also destroy every object, and so write to all pages that the forks share: with
    eight workers on two cores that takes 3 s.
    """
    for thing in gc.get_objects():  # not those of the server, which are frozen
        if issubclass(type(thing), io.IOBase):
            with suppress(Exception):  # closed, read only, or no longer of use
                thing.flush()
    ctypes.CDLL(None).fflush(None)  # those of code in C


def _become(
    pipe: Connection, program: tuple[str, int], data: dict[str, Any], called: bytes
) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Make this process one of the program; what it is to call."""
    # To multiprocessing the program is the parent, of which it has a descriptor that ends with it.
    parent = cast(Any, process)._ParentProcess(*program, os.dup(pipe.fileno()))
    cast(Any, process)._parent_process = parent
    current_worker.is_forked = False  # no worker has run in the server
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # as in a new process; Python's and torch's are so
    this: Any = multiprocessing.current_process()
    this._inheriting = True  # tells `run` that the program is being imported
    try:
        spawn.prepare(data)
        return cast("tuple[Callable[..., None], tuple[Any, ...]]", loads(called))
    finally:
        del this._inheriting
