"""Puts the simulated threads, queues and time where gradwire's modules look for the real ones.

Everything that a module of gradwire calls `threading`, `time` or `queue`, or has taken from
`queue`, is replaced while a history runs: no module need know of it, and a new one is simulated
without being told. Threads that are not simulated get the real thing all the while.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from operator import attrgetter
from types import ModuleType
from typing import Any

from gradwire import threads
from gradwire.autograd import scope
from gradwire.autograd.graph import edges, walk
from gradwire.testing.simulate import primitives
from gradwire.testing.simulate.scheduler import Scheduler, Unwound, here


def _either(real: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
    """The simulated one for simulated threads, the real one for others."""

    def made(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        scheduler = here()
        return real(*args, **kwargs) if scheduler is None else simulated(scheduler, *args, **kwargs)

    made.__name__ = real.__name__
    return made


def _copy(module: ModuleType, **changed: object) -> ModuleType:
    copied = ModuleType(module.__name__)
    vars(copied).update(vars(module) | changed)
    return copied


_OURS = re.compile(r"gradwire\.(?!testing\.simulate)")
_ROOM = 20
"""Threads are short-lived here, and programs not deep: room for more is most of a thread's work."""

_simple_queue = _either(queue.SimpleQueue, primitives.SimpleQueue)
_instead: dict[int, object] = {
    id(threading): _copy(
        threading,
        Lock=_either(threading.Lock, primitives.Lock),
        RLock=_either(threading.RLock, primitives.RLock),
        Condition=_either(threading.Condition, primitives.Condition),
        Event=_either(threading.Event, primitives.Event),
        Thread=_either(threading.Thread, primitives.Thread),
        Timer=_either(threading.Timer, primitives.Timer),
        current_thread=_either(threading.current_thread, Scheduler.me),
    ),
    id(time): _copy(
        time,
        **dict.fromkeys(
            ("monotonic", "perf_counter", "time"), _either(time.monotonic, attrgetter("now"))
        ),
        sleep=_either(time.sleep, primitives.sleep),
    ),
    id(queue): _copy(queue, SimpleQueue=_simple_queue),
    id(queue.SimpleQueue): _simple_queue,
    id(threads.thread): _either(threads.thread, primitives.thread),
}


@contextmanager
def _substituted(others: list[ModuleType]) -> Iterator[None]:
    changed = [*_places_of_ours(len(sys.modules)), *_places(others)]
    for module, name, value in changed:
        setattr(module, name, _instead[id(value)])
    numbers: list[tuple[ModuleType, str, float]] = [
        *[(module, "ROOM", _ROOM) for module in (edges, scope, walk)],
    ]
    changed += [(module, name, getattr(module, name)) for module, name, _ in numbers]
    for module, name, number in numbers:
        setattr(module, name, number)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


@lru_cache(1)
def _places_of_ours(modules: int) -> list[tuple[ModuleType, str, object]]:
    """Looked for again when there are more modules than last time."""
    return _places([module for name, module in list(sys.modules.items()) if _OURS.match(name)])


def _places(modules: list[ModuleType]) -> list[tuple[ModuleType, str, object]]:
    return [
        (module, name, value)
        for module in modules
        for name, value in list(vars(module).items())
        if id(value) in _instead
    ]


@contextmanager
def simulated(modules: list[ModuleType]) -> Iterator[logging.Logger]:
    """Simulated threads and time in gradwire and in these modules; gives gradwire's logger."""
    with _substituted(modules), _quiet() as log, _on_one_core():
        yield log


@contextmanager
def _quiet() -> Iterator[logging.Logger]:
    """No garbage collection, no warnings, nothing logged elsewhere or printed of Unwound."""
    log = logging.getLogger("gradwire")
    propagate, hook, was_enabled = log.propagate, sys.unraisablehook, gc.isenabled()
    log.propagate = False

    def unraisable(what: Any) -> None:  # noqa: ANN401
        if not issubclass(what.exc_type, Unwound):
            hook(what)

    sys.unraisablehook = unraisable
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield log
    finally:
        log.propagate, sys.unraisablehook = propagate, hook
        if was_enabled:
            gc.enable()


@contextmanager
def _on_one_core() -> Iterator[None]:
    """One thread runs at a time: on two cores each hand-over would wake the other core."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(allowed)[os.getpid() % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
