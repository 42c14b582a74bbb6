"""Anomaly mode and autocast of one worker, for what another runs on its behalf.

Calls carry them, and so does the Start of a pass: a backward inside of an autocast block runs its
operators under autocast, as in one process. Torch keeps casts of weights until the block ends. The
callee cannot know which of its calls come from one block, so it keeps them during one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec
import torch

from gradwire.autograd.anomaly import OFF, current_mode, detecting, under
from gradwire.errors import BadMessage
from gradwire.torch_private import Node
from gradwire.wire.tensor import DTYPE_CODES, DTYPES

_DEVICES = ("cpu", "cuda", "xpu", "mps")
_TO = (torch.float16, torch.bfloat16)


class Modes(msgspec.Struct, frozen=True, array_like=True):
    """Those that are on."""

    anomaly: int = OFF
    """see anomaly.py"""
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
    return Modes(current_mode(), dtypes, torch.is_autocast_cache_enabled())


@contextmanager
def in_modes(modes: Modes, roots: Sequence[Node] = (), worker: str = "") -> Iterator[None]:
    """A block in which a peer's modes are on; BadMessage for what is none.

    With `roots`, an engine run from these nodes is in the block; see `anomaly.detecting`.
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
