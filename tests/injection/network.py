"""A network of this machine's own, for root: each worker in a namespace, and a switch between them.

The switch is a thread that reads what one namespace sends and writes it to another: late, twice, in
another order or not at all, as it was told. Workers in it speak real TCP through a real kernel.
It needs Linux, `ip` and /dev/net/tun; `tc` to be slow and `ss` to end connections.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import final

from gradwire.errors import UsageError

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_DEVICE = "gw0"
_SUBNET = "10.77.0"
_FRAME = 1 << 16
_BROADCAST = b"\xff" * 6
_COMMAND_SECONDS = 20.0


def is_possible() -> bool:
    """Whether this process may build one."""
    tools = all(map(shutil.which, ("ip", "tc", "ss")))
    return tools and hasattr(os, "geteuid") and os.geteuid() == 0 and Path("/dev/net/tun").exists()


def enter(namespace: str) -> None:
    """From now on sockets of this thread, and of those that it starts, are in this namespace."""
    with open(f"/run/netns/{namespace}") as place:
        _set_namespace(place.fileno())


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """In this namespace inside the block."""
    with open("/proc/thread-self/ns/net") as before:
        enter(namespace)
        try:
            yield
        finally:
            _set_namespace(before.fileno())


def _set_namespace(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


@final
class Network:
    """n namespaces on one switch; `seed` decides chances.

    >>> with Network(2) as network:
    ...     network.black_hole(0, 1)
    """

    def __init__(self, n: int, *, seed: int = 0) -> None:
        if not is_possible():
            raise UsageError("a network of its own needs root, ip, tc, ss and /dev/net/tun")
        self._random = random.Random(seed)
        self.namespaces = [f"gradwire-{os.getpid()}-{i}" for i in range(n)]
        self._taps: list[int] = []
        self._lock = threading.Lock()
        self._holes: set[tuple[int, int]] = set()
        self._delay = self._jitter = self._loss = self._again = 0.0
        self.forwarded = self.dropped = 0  # frames, so far

    def address(self, i: int) -> str:
        """Where a worker in the i-th namespace listens."""
        return f"tcp://{_SUBNET}.{i + 1}:0"

    def __enter__(self) -> Network:
        with ExitStack() as stack:
            for i, name in enumerate(self.namespaces):
                self._run("ip", "netns", "add", name)
                stack.callback(self._run, "ip", "netns", "del", name)
                self._taps.append(_tap(name))
                stack.callback(os.close, self._taps[-1])
                self._run("ip", "-n", name, "addr", "add", f"{_SUBNET}.{i + 1}/24", "dev", _DEVICE)
                for device in ("lo", _DEVICE):
                    self._run("ip", "-n", name, "link", "set", device, "up")
            self._ended, self._wake = os.pipe()
            stack.callback(os.close, self._ended)
            thread = threading.Thread(target=self._switch, name="switch", daemon=True)
            thread.start()
            stack.callback(thread.join, _COMMAND_SECONDS)
            stack.callback(os.close, self._wake)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- what may go wrong

    def black_hole(self, i: int, j: int, *, one_way: bool = False) -> None:
        """What i sends to j disappears, and what j sends to i unless one way."""
        with self._lock:
            self._holes |= {(i, j)} if one_way else {(i, j), (j, i)}

    def disturb(
        self, *, delay: float = 0.0, jitter: float = 0.0, loss: float = 0.0, again: float = 0.0
    ) -> None:
        """Delay frames by `delay` and up to `jitter` seconds; lose some, and send some `again`."""
        with self._lock:
            self._delay, self._jitter, self._loss, self._again = delay, jitter, loss, again

    def heal(self) -> None:
        """Everything arrives, at once and in order; cables are in, nothing is slow."""
        with self._lock:
            self._holes = set()
        self.disturb()
        for name in self.namespaces:
            self._run("ip", "-n", name, "link", "set", _DEVICE, "up")
            with suppress(subprocess.CalledProcessError):  # there is nothing to take away
                self._run("tc", "-n", name, "qdisc", "del", "dev", _DEVICE, "root")

    def slow(self, i: int, rate: str = "8mbit") -> None:
        """What i sends leaves at this rate, as `tc` writes it."""
        limits = ("burst", "32kb", "latency", "400ms")
        where = ("dev", _DEVICE, "root", "tbf", "rate", rate)
        self._run("tc", "-n", self.namespaces[i], "qdisc", "replace", *where, *limits)

    def unplug(self, i: int) -> None:
        """Take its cable out."""
        self._run("ip", "-n", self.namespaces[i], "link", "set", _DEVICE, "down")

    def end_connections(self, i: int) -> None:
        """The kernel ends every TCP connection of i."""
        name = self.namespaces[i]
        self._run("ip", "netns", "exec", name, "ss", "-K", "-t", "state", "established")

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, timeout=_COMMAND_SECONDS)

    # -- the switch

    def _switch(self) -> None:
        poll = select.poll()
        for fd in (*self._taps, self._ended):
            poll.register(fd, select.POLLIN)
        ports = {fd: i for i, fd in enumerate(self._taps)}
        homes: dict[bytes, int] = {}
        late: list[tuple[float, int, int, bytes]] = []
        while True:
            wait = None if not late else max(0.0, late[0][0] - time.monotonic()) * 1000
            for fd, _ in poll.poll(wait):
                if fd == self._ended:
                    return
                with suppress(OSError):  # its cable is out
                    frame = os.read(fd, _FRAME)
                    homes[frame[6:12]] = ports[fd]
                    self._take(late, ports[fd], homes.get(frame[:6]), frame)
            while late and late[0][0] <= time.monotonic():
                _, _, port, frame = heapq.heappop(late)
                with suppress(OSError):
                    os.write(self._taps[port], frame)

    def _take(
        self, late: list[tuple[float, int, int, bytes]], source: int, home: int | None, frame: bytes
    ) -> None:
        everybody = home is None or frame[:6] == _BROADCAST
        now, chance = time.monotonic(), self._random.random
        with self._lock:
            for port in range(len(self._taps)):
                if port == source or not (everybody or port == home):
                    continue
                if (source, port) in self._holes or chance() < self._loss:
                    self.dropped += 1
                    continue
                for _ in range(2 if chance() < self._again else 1):
                    self.forwarded += 1
                    due = now + self._delay + chance() * self._jitter
                    heapq.heappush(late, (due, self.forwarded, port, frame))


def _tap(namespace: str) -> int:
    """An end of a new device in the namespace: what is sent there is read here."""
    with inside(namespace):
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", _DEVICE.encode(), _TAP_WITHOUT_HEADER))
    return fd
