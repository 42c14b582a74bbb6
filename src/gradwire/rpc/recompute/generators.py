"""The random generators of a worker, and a lock so that checkpointed functions use them in turn.

See Note [Random numbers under a checkpoint], checkpoint_run.py.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any, final

import torch

from gradwire.current import get_current
from gradwire.rpc.recompute.recording import State

# The longest wait for a turn; half of the time left to the caller, if that is shorter. The code with
# the turn may wait for this code where gradwire cannot see it (`torch.futures.wait_all`, an event,
# a thread pool). Then both run, and a recomputation of what they drew meanwhile is refused.
_MAX_WAIT_SECONDS = 10.0


@final
class Generators:
    """The random generators that functions of a worker draw from, and the lock around their use."""

    def __init__(self, own: torch.Generator | None = None) -> None:
        self._cpu, self._has_devices = own or torch.default_generator, own is None
        self._turn = threading.Lock()
        self.max_wait_seconds = _MAX_WAIT_SECONDS
        self.overlaps = 0
        """changes when code that did not get a turn begins or ends"""

    def take_turn(self) -> bool:
        """Acquire the lock; False if that took too long."""
        if self._turn.acquire(blocking=False):
            return True
        _, deadline, *_ = get_current()
        left = (deadline - time.monotonic()) / 2
        taken = self._turn.acquire(timeout=max(0.0, min(self.max_wait_seconds, left)))
        self.overlaps += not taken
        return taken

    def end_turn(self) -> None:
        """Release the lock."""
        self._turn.release()

    def get_state(self) -> State:
        """The states of all generators in use: the CPU's, then those of the devices."""
        devices = [device.get_rng_state(i) for device, i in self._devices()]
        states = [self._cpu.get_state(), *devices]
        return tuple(ctypes.string_at(state.data_ptr(), state.numel()) for state in states)

    def set_state(self, state: State) -> None:
        """Restore what `get_state` returned."""
        cpu, *others = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in state)
        self._cpu.set_state(cpu)
        for (device, i), part in zip(self._devices(), others, strict=False):
            device.set_rng_state(part, i)

    def _devices(self) -> list[tuple[Any, int]]:
        """Each accelerator device of this process with its torch module; none before first use."""
        accelerator = torch.accelerator.current_accelerator() if self._has_devices else None
        device = None if accelerator is None else torch.get_device_module(accelerator)
        if not getattr(device, "_initialized", False):  # get_rng_state would initialize the device
            return []
        return [(device, i) for i in range(torch.accelerator.device_count())]


PROCESS = Generators()
"""shared by all workers of this process that have no generator of their own"""
