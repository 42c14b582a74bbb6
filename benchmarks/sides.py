"""A world of worker processes for each side, which stays up and runs blocks on request.

The rounds of the two sides alternate while both worlds exist. Between its blocks a world is
stopped (SIGSTOP): a process of torch.distributed.rpc polls its shared memory without a pause, and
would take most of a core from the other side. Nothing is in flight then, so no deadline passes.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

from benchmarks.api import certificates_beside, checksum_beside, load, secret_beside, settle

_PR_SET_PDEATHSIG = 1
_CORES = "BENCHMARK_CORES"
SECONDS = 300.0
"""The longest time for one block, one start or one end."""


class BlockFailed(Exception):
    """A worker process raised, died or did not answer in time."""


def cores() -> list[int]:
    """The cores that may be used; also in a process whose parent is pinned to one of them."""
    ours = " ".join(map(str, sorted(os.sched_getaffinity(0))))
    return [int(n) for n in os.environ.setdefault(_CORES, ours).split()]


def pin(n: int) -> None:
    """Pin this process, and the threads it will start, to one core; round robin."""
    allowed = cores()
    os.sched_setaffinity(0, {allowed[n % len(allowed)]})


class World:
    """The workers w0, w1, … of one side, each in its own process, pinned to a core.

    `starting` and `joining` are seconds: until all have imported their side, and from there until
    all have joined.
    """

    def __init__(
        self,
        side: str,
        size: int,
        *,
        exposed: Sequence[str] = (),
        tcp: bool = False,
        tls: bool = False,
        checksum: bool = False,
    ) -> None:
        self.side, self.size, self.tcp = side, size, tcp
        self._directory = tempfile.TemporaryDirectory(prefix="bench-")
        place = str(Path(self._directory.name) / "place")
        if tls:
            _make_certificates(place, size)
        if checksum:
            checksum_beside(place).touch()
        secret_beside(place).touch(mode=0o600)
        secret_beside(place).write_text(secrets.token_hex(32), encoding="ascii")
        spawn = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        begin = perf_counter()
        for rank in range(size):
            ours, theirs = spawn.Pipe()
            arguments = (theirs, side, rank, size, place, tcp, tuple(exposed))
            process = spawn.Process(target=_worker, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._hear_all()
            self.starting = perf_counter() - begin
            begin = perf_counter()
            self._tell_all("join")
            self._hear_all()
            self.joining = perf_counter() - begin
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """The process of each worker."""
        return [process.pid for process in self._processes]

    def run(self, function: Callable[..., Any], *args: Any, on: int = 0) -> Any:
        """Run `function(*args)` in the process of one worker and return its result."""
        self._signal(signal.SIGCONT)
        try:
            self._pipes[on].send((function, args))
            return self._hear(on)
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Let all workers leave; kill those that do not."""
        try:
            self._signal(signal.SIGCONT)
            self._tell_all(None)
            self._hear_all()
        except (BlockFailed, OSError):
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the processes, stopped or not."""
        self._signal(signal.SIGCONT)
        for process in self._processes:
            process.join(2.0 if process.exitcode is None else 0)
            process.kill()
            process.join(SECONDS)
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._directory.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.exitcode is None:
                os.kill(process.pid, number)

    def _tell_all(self, word: object) -> None:
        for pipe in self._pipes:
            pipe.send(word)

    def _hear_all(self) -> None:
        for rank in range(self.size):
            self._hear(rank)

    def _hear(self, rank: int) -> Any:
        pipe: Connection = self._pipes[rank]
        who = f"w{rank} of {self.side}"
        if not pipe.poll(SECONDS):
            raise BlockFailed(f"{who} said nothing for {SECONDS:.0f} s")
        try:
            is_well, value = pipe.recv()
        except EOFError:
            raise BlockFailed(f"{who} died") from None
        if not is_well:
            raise BlockFailed(f"{who} raised\n{value}")
        return value

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close() if error is None else self.kill()


def _make_certificates(place: str, size: int) -> None:
    from gradwire.launch.certs import Folder, make

    make(Folder(certificates_beside(place)), [f"w{rank}" for rank in range(size)])


def _worker(
    pipe: Connection, side: str, rank: int, size: int, place: str, tcp: bool, exposed: list[str]
) -> None:
    end_with_parent()
    pin(rank)
    warnings.showwarning = lambda *_, **__: None  # torch warns about its own calls
    import torch

    torch.set_num_threads(1)
    try:
        modules = [importlib.import_module(name) for name in exposed]
        api = load(side)
        settle(api)
        pipe.send((True, None))
        pipe.recv()
        api.begin(rank, size, place, tcp=tcp, exposed=modules)
        gc.freeze()  # as in processes that gradwire.run starts; for both sides
        pipe.send((True, None))
        while (command := pipe.recv()) is not None:
            pipe.send(_answer(*command))
        api.end()
        pipe.send((True, None))
        os._exit(0)  # skips the finalization of the interpreter
    except EOFError:  # the parent is gone
        os._exit(1)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        os._exit(1)


def end_with_parent() -> None:
    """Let the kernel end this process with its parent: while stopped it cannot see its pipe end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a new process, and end everything that it started; its result."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_apart, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        if not ours.poll(SECONDS):
            raise BlockFailed(f"nothing for {SECONDS:.0f} s")
        is_well, value = ours.recv()
    except EOFError:
        raise BlockFailed("its process died") from None
    finally:
        process.join(10.0)
        process.kill()
        process.join(SECONDS)
        process.close()
        ours.close()
    if not is_well:
        raise BlockFailed(value)
    return value


def _apart(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    end_with_parent()
    pipe.send(_answer(function, args))


def _answer(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, function(*args)
    except Exception:
        return False, traceback.format_exc()


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy with a process that belongs to neither side."""
    spawn = multiprocessing.get_context("spawn")
    burners = [spawn.Process(target=_burn, args=(n,), daemon=True) for n in range(len(cores()))]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join(SECONDS)
            burner.close()


def _burn(n: int) -> None:
    end_with_parent()
    pin(n)
    while True:
        pass
