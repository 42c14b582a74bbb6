"""Anomaly mode and autocast of one worker, for what another runs on its behalf.

Calls carry them, and so does the Start of a pass. Under anomaly mode the callee's nodes remember
the lines that made them, and an error is found on the worker whose operator causes it. Torch has
one switch for all threads of a process. So it is on while at least one such request is served, and
other requests that run meanwhile are checked too.

A backward inside of an autocast block runs its operators under autocast, as in one process. Torch
keeps casts of weights until the block ends. The callee cannot know which of its calls come from one
block, so it keeps them during one call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, cast, final

import msgspec
import torch

from gradwire.autograd.graph.walk import reachable_from
from gradwire.errors import BadMessage
from gradwire.torch_private import Node
from gradwire.wire.tensor import DTYPE_CODES, DTYPES

OFF, ON, CHECKS_NAN = 0, 1, 2
"""Anomaly mode in messages: off; on; on, and a NaN in a gradient is an error."""
_CROSSINGS: Final = "torch::distributed::autograd::"
_UNKNOWN: Final = "  (no information: anomaly mode was off in the forward)\n"
_DEVICES = ("cpu", "cuda", "xpu", "mps")
_TO = (torch.float16, torch.bfloat16)


class Modes(msgspec.Struct, frozen=True, array_like=True):
    """Those that are on."""

    anomaly: int = OFF
    """0 off, 1 on, 2 on and a NaN in a gradient is an error"""
    autocast: dict[str, int] = {}
    """to which dtype each kind of device casts"""
    keeps_casts: bool = True
    """whether casts of weights are kept"""


def current_modes(*, autocast: bool = True) -> Modes:
    """Those of this thread, with autocast or without."""
    dtypes = {
        device: DTYPE_CODES[torch.get_autocast_dtype(device)]
        for device in (_DEVICES if autocast else ())
        if torch.is_autocast_enabled(device)
    }
    return Modes(current_anomaly(), dtypes, torch.is_autocast_cache_enabled())


@contextmanager
def in_modes(modes: Modes, roots: Sequence[Node] = (), worker: str = "") -> Iterator[None]:
    """A block in which a peer's modes are on; BadMessage for what is none.

    With `roots`, an engine run from these nodes is in the block; see `detecting`.
    """
    with ExitStack() as stack:
        for device, code in modes.autocast.items():
            dtype = DTYPES.get(code)
            if device not in _DEVICES or dtype not in _TO:
                raise BadMessage(f"{device!r:.20} cannot be autocast to dtype {code}")
            # A worker without such a device runs no operator on it, and torch would warn.
            if device == "cpu" or torch.get_device_module(device).is_available():
                block = torch.autocast(device, dtype=dtype, cache_enabled=modes.keeps_casts)
                stack.enter_context(block)
        if modes.anomaly > OFF:
            anomaly = detecting(modes.anomaly, roots, worker) if roots else under(modes.anomaly)
            stack.enter_context(anomaly)
        yield


# -- anomaly mode


def current_anomaly() -> int:
    """The anomaly mode of this process."""
    if not torch.is_anomaly_enabled():
        return OFF
    return CHECKS_NAN if torch.is_anomaly_check_nan_enabled() else ON


@final
class _AnomalySwitch:
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
        mode = max(self._open, default=OFF)
        checks_nan = self._before == (True, True) or mode >= CHECKS_NAN
        torch.set_anomaly_enabled(*((True, checks_nan) if mode else self._before))


under = _AnomalySwitch().on


@contextmanager
def detecting(mode: int, roots: Iterable[Node], worker: str) -> Iterator[None]:
    """The same, around an engine run from these nodes on this thread.

    Torch warns of the forward line on this worker only. A note on the error tells the caller.
    """
    running: list[Node] = []

    def note(node: Node, _: object) -> None:
        running[:] = [node]

    handles = [node.register_prehook(partial(note, node)) for node in reachable_from(roots)]
    try:
        with under(mode):
            yield
    except Exception as error:
        if running and not running[0].name().startswith(_CROSSINGS):  # else raised elsewhere
            made: dict[str, list[str]] = cast(Any, running[0]).metadata
            error.add_note(  # the text of torch's own warning, with the worker
                f"Error detected in {running[0].name()} on {worker}. "
                "Traceback of forward call that caused the error:\n"
                + "".join(made.get("traceback_", [_UNKNOWN]))
            )
        raise
    finally:
        for handle in handles:
            handle.remove()
        running.clear()
