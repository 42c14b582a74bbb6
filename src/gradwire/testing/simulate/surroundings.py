"""What is different in a process while a history runs in it."""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from gradwire.testing.simulate.environment import substituted
from gradwire.testing.simulate.scheduler import Unwound


@contextmanager
def simulated(modules: Iterable[ModuleType] = ()) -> Iterator[logging.Logger]:
    """Simulated threads and time in gradwire and in these; gives the logger of gradwire."""
    with substituted(modules), _quiet() as log:
        yield log


@contextmanager
def _quiet() -> Iterator[logging.Logger]:
    """Collect garbage when told only; keep what is logged, and what ends by Unwound, for us."""
    log = logging.getLogger("gradwire")
    propagate, hook, was_enabled = log.propagate, sys.unraisablehook, gc.isenabled()
    log.propagate = False

    def unraisable(what: Any) -> None:  # noqa: ANN401
        if not issubclass(what.exc_type, Unwound):
            hook(what)

    sys.unraisablehook = unraisable
    gc.disable()
    try:
        with warnings.catch_warnings(), _on_one_core():
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
