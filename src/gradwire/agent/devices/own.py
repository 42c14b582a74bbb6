"""OwnDevices: the devices of this worker, their names, drivers and current streams.

Note [Streams]: a call may return before the device has computed its arguments. What is sent is
copied on the current stream of the thread that sends, and what arrives is copied on the current
stream of the thread that decodes it, so both are in order with the work before and after. Nothing
here waits for the device, except where a tensor arrives in host memory. Functions and engine runs
that peers ask for run on the default streams: all work of a process that other workers ask for is
then in one order, as in one local program, and values kept here need no events. Threads of gradwire
have these streams anyway; a thread of the user may serve while it waits for an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple, final

import torch
from torch import Tensor

from gradwire.agent.devices.maps import CPU, unmapped
from gradwire.torch_private import NOTHING
from gradwire.transport.devices.contract import DeviceDriver
from gradwire.transport.devices.cuda import cuda_driver
from gradwire.wire.tensor import META

Drivers = Callable[[str], DeviceDriver | str]
"""the driver of a type of device, or why there is none"""
Handoff = Callable[[], None]
"""makes the current streams of the thread that calls it wait for tensors of another one"""


class Home(NamedTuple):
    """Where a tensor was that has left: its device, and the stream that was current there."""

    device: torch.device
    stream: object = None


ON_CPU = Home(torch.device(CPU))


class OwnDevice(NamedTuple):
    """A device of this worker, as it is named in device maps and, without one, in messages."""

    text: str
    name: str
    driver: DeviceDriver | None
    types: tuple[type[Tensor], ...]
    """the classes of tensors that its driver can copy"""


def drivers_of_this_process(kind: str) -> DeviceDriver | str:
    """The driver for a type of torch.device."""
    return cuda_driver() if kind == "cuda" else f"{kind} devices have no lane"


@final
class OwnDevices(dict[torch.device, OwnDevice]):
    """Those that were used. hot: a subclass of dict finds a device in one step"""

    def __init__(self, drivers: Drivers) -> None:
        super().__init__()
        self.drivers = drivers

    def __missing__(self, device: torch.device) -> OwnDevice:
        """Look at a device that is used for the first time."""
        driver = "" if device.type in (CPU, META) else self.drivers(device.type)
        text = str(device)
        if isinstance(driver, str):
            own = OwnDevice(text, text, None, ())
        else:
            own = OwnDevice(text, unmapped(text, driver.uuid_of(device)), driver, driver.types)
        self[device] = own
        return own

    def stream_of(self, device: torch.device) -> object:
        """The current stream of this thread there, if it has streams."""
        driver = self[device].driver
        return None if driver is None else driver.current_stream(device)

    def homes_of(self, tensors: Sequence[Tensor]) -> tuple[Home, ...]:
        """Where these tensors are."""
        devices = [tensor.device for tensor in tensors]
        return tuple([Home(device, self.stream_of(device)) for device in devices])

    def using(self, homes: Sequence[Home]) -> AbstractContextManager[object]:
        """Make the streams of these homes current."""
        stack = ExitStack()
        for device, stream in homes:
            driver = self[device].driver
            if driver is not None:
                stack.enter_context(driver.using(stream))
        return stack

    def default_streams(self, kind: str) -> AbstractContextManager[object]:
        """See Note [Streams]: what is served on a user's thread must not use that thread's."""
        if kind == "cuda" and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return NOTHING  # and do not ask the driver, which would begin to use CUDA
        driver = self.drivers(kind)
        return NOTHING if isinstance(driver, str) else driver.on_default_streams()

    def handoff(self, tensors: Sequence[Tensor]) -> Handoff | None:
        """For another thread or stream: called there, its stream waits for these tensors."""
        drivers = [(self[tensor.device].driver, tensor) for tensor in tensors]
        joins = [driver.handoff(tensor) for driver, tensor in drivers if driver is not None]
        if not joins:
            return None

        def join_all() -> None:
            for join in joins:
                join()

        return join_all

    def join_default_streams(self, tensors: Sequence[Tensor]) -> None:
        """What is served from now on may use these tensors, which this thread's streams make."""
        join = self.handoff(tensors)
        if join is not None:
            with ExitStack() as stack:
                for kind in {tensor.device.type for tensor in tensors}:
                    stack.enter_context(self.default_streams(kind))
                join()
