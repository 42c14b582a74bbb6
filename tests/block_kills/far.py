"""What the two processes of a kill loop run: exchanges of device tensors, and their own death."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field

import torch

import gradwire
from gradwire.agent.devices import lanes
from gradwire.current import current_worker

SIZE = 1000
ONCE = ("make", "open", "write", "read")
"""what is done with a new block"""
METHODS = (*ONCE, "begin", "fill", "filled", "begin_taking", "take", "taken")
CYCLES = 20_000_000
"""of the GPU: about 10 ms"""


@dataclass
class Here:
    """What this process keeps between commands."""

    device: str = ""
    armed: tuple[str, int] = ("", 0)
    met: Counter = field(default_factory=Counter)


HERE = Here()


def join(name, rank, options, device) -> None:
    HERE.device = device
    if device.startswith("pretend"):
        from gradwire.testing.pretend.tensors import install
        from tests.block_kills.shared_driver import SharedBlock, SharedDriver

        install()
        classes = (SharedBlock, SharedDriver)
    else:
        from gradwire.transport.devices.cuda import CudaBlock, CudaDriver

        classes = (CudaBlock, CudaDriver)
    for owner in classes:
        for method in METHODS:
            if hasattr(owner, method):
                _watch(owner, method)
    gradwire.init_rpc(name, rank, options=options, expose=[sys.modules[__name__]])
    if device.startswith("pretend"):
        driver = SharedDriver()
        current_worker.find().devices._own.drivers = lambda _: driver


def _watch(owner, method) -> None:
    plain = getattr(owner, method)

    def watched(self, *args, **settings):
        _meet(f"before {method}")
        value = plain(self, *args, **settings)
        _meet(f"after {method}")
        return value

    setattr(owner, method, watched)


def _meet(point: str) -> None:
    HERE.met[point] += 1
    if HERE.armed == (point, HERE.met[point]):
        os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str = "", nth: int = 0) -> None:
    """Die when this point is met for the nth time from now on."""
    HERE.armed = point, nth
    HERE.met.clear()


def met() -> dict[str, int]:
    return dict(HERE.met)


# -- what peers call


def twice(x):
    _delay()
    return x * 2


# -- what the root is told


def exchange(peer: str, value: float) -> tuple[list[float], list[float]]:
    """All numbers of the result of a call, and of the gradient of its argument."""
    x = torch.full((SIZE,), value).to(HERE.device).requires_grad_()
    _delay()
    y = gradwire.rpc_sync(peer, twice, args=(x,))
    (y * 3).sum().backward()
    return y.detach().cpu().unique().tolist(), x.grad.cpu().unique().tolist()


def _delay() -> None:
    """On a GPU, what is sent next is not there when the message is."""
    if HERE.device.startswith("cuda"):
        torch.cuda._sleep(CYCLES)


# -- what everybody is asked, by its own line


def lanes_left() -> int:
    """Lanes and blocks that this worker keeps for peers."""
    gc.collect()
    lanes.free_kept_blocks()
    devices = current_worker.find().devices
    return len(devices._incoming) + len(devices._outgoing) + len(lanes._kept)


def memory_in_use() -> int:
    """Bytes of the device, by all processes if it is a real one."""
    if HERE.device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free
    from tests.block_kills.shared_driver import SharedBlock

    return SharedBlock.mapped
