"""The generators that the functions of a worker draw random numbers from, and whose turn it is.

See Note [Random numbers under a checkpoint], session.py.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any, final

import torch

from gradwire.current import current_deadline
from gradwire.rpc.recompute.tape_state import State

_PATIENCE = 10.0
"""Seconds to wait for a turn, at most; and at most half of the time that is left to this code. Who
has the turn may wait for this code in a way that cannot be seen here (`torch.futures.wait_all`, an
event, a thread pool). Then both go on, and what they draw meanwhile is not repeated but refused.
"""


@final
class Stream:
    """The generators that functions of a worker draw from, and whose turn it is."""

    def __init__(self, own: torch.Generator | None = None) -> None:
        self._own = own
        self._turn = threading.Lock()
        self.patience = _PATIENCE
        self.overlaps = 0
        """changes when code begins or ends that runs without a turn, beside the one who has it"""

    def take_turn(self) -> bool:
        """Whether it was had in time."""
        if self._turn.acquire(blocking=False):
            return True
        left = (current_deadline() - time.monotonic()) / 2
        taken = self._turn.acquire(timeout=max(0.0, min(self.patience, left)))
        self.overlaps += not taken
        return taken

    def end_turn(self) -> None:
        """Let the next one draw."""
        self._turn.release()

    def state(self) -> State:
        """All that decides which numbers come next."""
        own = torch.default_generator if self._own is None else self._own
        states = [own.get_state()]
        if self._own is None:
            states += [device.get_rng_state(i) for device, i in _devices()]
        return tuple(ctypes.string_at(state.data_ptr(), state.numel()) for state in states)

    def put(self, state: State) -> None:
        """From now on, the numbers that come after this state."""
        cpu, *others = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in state)
        (torch.default_generator if self._own is None else self._own).set_state(cpu)
        if self._own is None:
            for (device, i), part in zip(_devices(), others, strict=False):
                device.set_rng_state(part, i)


PROCESS = Stream()
"""what all workers share that have no generator of their own"""


def _devices() -> list[tuple[Any, int]]:
    """The devices of this process, with the module that knows their generators, if in use."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    device = torch.get_device_module(accelerator)
    if not getattr(device, "_initialized", False):  # to ask for its state would initialize it
        return []
    return [(device, i) for i in range(torch.accelerator.device_count())]
