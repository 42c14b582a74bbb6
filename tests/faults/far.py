"""What the tests of faults run on workers of other processes."""

from __future__ import annotations

import ctypes
import os
import resource
import sys

import gradwire
from gradwire.current import current_worker
from tests.leftovers import eventually

_kept: list[int] = []


def here() -> str:
    return gradwire.get_worker_info().name


def cubed(x):
    return x**3


def contexts() -> int:
    return len(current_worker.find().engine.contexts)


def in_a_context(worker, x):
    """Opens one, calls another worker in it, and stays."""
    with gradwire.context():
        gradwire.rpc_sync(worker, cubed, args=(x,))
        eventually(lambda: False, 30)


def crash_in_c():
    ctypes.string_at(0)


def exit_python():
    sys.exit("enough")


def interrupt():
    raise KeyboardInterrupt


def hold_interpreter(seconds) -> None:
    """A call into C that does not let go of the interpreter."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def use_up_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8,) * 2)
    try:
        while True:
            _kept.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return


def give_descriptors_back() -> None:
    while _kept:
        os.close(_kept.pop())
