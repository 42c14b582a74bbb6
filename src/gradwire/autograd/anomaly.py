"""Anomaly mode, for what one worker runs on behalf of another that has it on.

Calls carry the mode, so that the callee's nodes remember the lines that made them, and so does the
Start of a pass, so that an error is found on the worker whose operator causes it. Torch has one
switch for all threads of a process. So it is on while at least one such request is served, and
other requests that run meanwhile are checked too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, cast, final

import torch

from gradwire.autograd.graph.walk import reachable_from
from gradwire.torch_private import Node

OFF, ON, CHECKS_NAN = 0, 1, 2
"""The mode in messages: off; on; on, and a NaN in a gradient is an error."""
_CROSSINGS: Final = "torch::distributed::autograd::"
_UNKNOWN: Final = "  (no information: anomaly mode was off in the forward)\n"


def current_mode() -> int:
    """The mode of this process. hot: asked by every call"""
    if not torch.is_anomaly_enabled():
        return OFF
    return CHECKS_NAN if torch.is_anomaly_check_nan_enabled() else ON


@final
class _Switch:
    """Torch's switch, shared by overlapping requests."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: list[int] = []
        self._before = (False, True)

    @contextmanager
    def on(self, mode: int) -> Iterator[None]:
        """A block in which at least this mode is on."""
        with self._lock:
            if not self._open:
                self._before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
            self._open.append(mode)
            self._set()
        try:
            yield
        finally:
            with self._lock:
                self._open.remove(mode)
                if self._open or torch.is_anomaly_enabled():  # else the program turned it off
                    self._set()

    def _set(self) -> None:
        checks_nan = self._before == (True, True) or max(self._open, default=OFF) >= CHECKS_NAN
        torch.set_anomaly_enabled(*((True, checks_nan) if self._open else self._before))


_switch = _Switch()


def under(mode: int) -> AbstractContextManager[None]:
    """A block in which at least this mode is on."""
    return _switch.on(mode) if mode > OFF else nullcontext()


@contextmanager
def detecting(mode: int, roots: Iterable[Node], worker: str) -> Iterator[None]:
    """The same, around an engine run from these nodes on this thread.

    Torch warns of the forward line on this worker only. A note on the error tells the caller.
    """
    running: list[Node] = []
    handles = [
        node.register_prehook(partial(_note, running, node)) for node in reachable_from(roots)
    ]
    try:
        with under(mode):
            yield
    except Exception as error:
        if running and not running[0].name().startswith(_CROSSINGS):  # else raised elsewhere
            error.add_note(_said_of(running[0], worker))
        raise
    finally:
        for handle in handles:
            handle.remove()
        running.clear()


def _note(running: list[Node], node: Node, _: Any) -> None:  # noqa: ANN401
    running[:] = [node]


def _said_of(node: Node, worker: str) -> str:
    """The text of torch's own warning, with the worker."""
    made: dict[str, list[str]] = cast(Any, node).metadata
    lines = "".join(made.get("traceback_", [_UNKNOWN]))
    return (
        f"Error detected in {node.name()} on {worker}. "
        f"Traceback of forward call that caused the error:\n{lines}"
    )
