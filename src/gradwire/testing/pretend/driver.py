"""The device lane of pretended devices, by the contract of transport/devices/contract.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import final

import torch
from torch import Tensor

from gradwire.testing.pretend.streams import (
    KIND,
    Event,
    Stream,
    current_stream,
    default_stream,
    use_stream,
)
from gradwire.testing.pretend.tensors import DEVICES, GARBAGE, PretendTensor, allocated
from gradwire.transport.devices.words import Marks
from gradwire.wire.tensor import Layout


@final
class PretendBlock:
    """A block of pretended device memory, shared by the workers of this process."""

    handle = b""

    def __init__(self, device: torch.device, room: int) -> None:
        self.device, self.room = device, room
        self._memory = torch.full((room,), GARBAGE, dtype=torch.uint8, device="cpu")
        self._ready, self._free = Event(), Event()

    def begin(self, stream: Stream, *, was_taken: bool) -> None:
        """The owner's stream waits until the block may be overwritten."""
        stream.wait_event(self._free if was_taken else self._ready)

    def fill(self, offset: int, tensor: Tensor, stream: Stream) -> None:
        """Copy a contiguous tensor of this device into the block."""
        assert isinstance(tensor, PretendTensor)
        source = tensor.memory
        into = self._memory[offset : offset + tensor.nbytes]
        stream.queue(lambda: into.copy_(source.reshape(-1).view(torch.uint8)))
        tensor.record_stream(stream)

    def filled(self, stream: Stream) -> None:
        """Mark that it is ready."""
        self._ready.record(stream)

    def begin_taking(self, stream: Stream) -> None:
        """The peer's stream waits until the block is filled."""
        stream.wait_event(self._ready)

    def take(self, offset: int, layout: Layout, to: torch.device, stream: Stream) -> Tensor:
        """A new tensor with what lies at the offset, on the current stream of its device."""
        source = self._memory[offset : offset + layout.nbytes].view(layout.dtype)
        source = source.as_strided(layout.shape, layout.strides, source.storage_offset())
        if to.type == "cpu":
            stream.synchronize()
            return source.clone()
        memory = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype)
        tensor, theirs = allocated(memory, to), current_stream(to)
        if theirs is not stream:
            stream.wait_stream(theirs)
        inner = tensor.memory
        stream.queue(lambda: inner.copy_(source))
        if theirs is not stream:
            theirs.wait_stream(stream)
            tensor.record_stream(stream)
        return tensor

    def taken(self, stream: Stream) -> None:
        """Mark that it is free."""
        self._free.record(stream)

    def read(self, nbytes: int) -> bytes:
        """The first bytes, now."""
        return self._memory[:nbytes].numpy().tobytes()

    def write(self, data: bytes) -> None:
        """Set the first bytes, now."""
        self._memory[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)

    def is_behind(self) -> bool:
        """Never: there is no other process."""
        return False

    def abandon(self) -> None:
        """Not needed."""

    def release(self) -> None:
        """Garbage from now on."""
        self._memory.fill_(GARBAGE)


@final
class PretendDriver:
    """The pretended devices, which every worker of this process sees."""

    kind = KIND
    types: tuple[type[Tensor], ...] = (PretendTensor,)

    def __init__(self, budget: int = 1 << 24) -> None:
        self._budget = budget

    def uuid_of(self, device: torch.device) -> str:
        """The name of a device that is the same for all workers."""
        return f"pretended-{device.index}"

    def device_with(self, uuid: str) -> torch.device | None:
        """The device with that name."""
        names = {f"pretended-{index}": index for index in range(DEVICES)}
        return torch.device(KIND, names[uuid]) if uuid in names else None

    def current_stream(self, device: torch.device) -> Stream:
        """The stream on which this thread queues work of a device."""
        return current_stream(device)

    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """Make a stream current for its device."""
        return use_stream(stream)

    def on_default_streams(self) -> AbstractContextManager[object]:
        """Make the default stream of each device current, for the calling thread."""
        stack = ExitStack()
        for index in range(DEVICES):
            stack.enter_context(use_stream(default_stream(torch.device(KIND, index))))
        return stack

    def handoff(self, tensor: Tensor) -> Callable[[], None]:
        """See the contract."""
        assert isinstance(tensor, PretendTensor)
        made_on, event = current_stream(tensor.device), Event()
        event.record(made_on)

        def join() -> None:
            stream = current_stream(tensor.device)
            if stream is not made_on:
                stream.wait_event(event)
                tensor.record_stream(stream)

        return join

    def check_not_capturing(self) -> None:
        """Pretended work is never captured."""

    def budget_of(self, _: torch.device) -> int:
        """How many bytes of the device blocks for one peer may take."""
        return self._budget

    def make(self, device: torch.device, room: int, _: Marks) -> PretendBlock:
        """Allocate a block."""
        return PretendBlock(device, room)

    def open(self, device: torch.device, room: int, handle: bytes, _: Marks) -> PretendBlock:
        """Not possible: pretended memory is not shared between processes."""
        raise AssertionError("pretended devices are shared inside of one process only")
