"""The contract of a device lane: blocks of device memory that two workers share.

The owner of a block copies tensors into it, and one peer copies them out. Both are device work: it
is queued on the current stream of the thread that asks for it, and no thread waits for the device.
Two marks in a page that both map (words.py) keep the order. A mark is a number that a stream writes
when it has come so far, and that a stream of the other process can wait for:

    ready   the owner's stream has filled the block for its nth use
    free    the peer's stream has taken the tensors of that use out

The host counts the uses, and reads marks too: mostly they have come already, and no stream waits.

Note [Marks, not events]: a stream that waits for an event of another process waits for ever if that
process is killed before its device has come so far; nothing can complete the event. A mark can be
written by the host that is left (`abandon`).

Note [The order of a block]: per use, `begin`, `fill`…, `filled` by the owner, then the message,
then `begin_taking`, `take`…, `taken` by the peer, then the word. A message that never leaves, or is
dropped unread, skips the middle, and the word says so: then `begin` waits for `ready` instead of
`free`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire.transport.devices.words import Marks
from gradwire.wire.tensor import Layout

BLOCK_ALIGNMENT = 256
"""of each tensor in a block: what the device's own allocator guarantees"""


class DeviceError(Exception):
    """The device refused something. The lane is not used again on this link."""


class DeviceBlock(Protocol):
    """Memory of one device that an owner and a peer share. See Note [The order of a block].

    `stream` is always the one that is current for the block's device, which takes long to find.
    """

    room: int
    device: torch.device

    @property
    def handle(self) -> bytes:
        """For the peer to open it."""

    def begin(self, stream: Any, *, was_taken: bool) -> None:  # noqa: ANN401
        """The owner's stream waits until the block may be overwritten."""

    def fill(self, offset: int, tensor: Tensor, stream: Any) -> None:  # noqa: ANN401
        """Copy a contiguous tensor of this device into the block."""

    def filled(self, stream: Any) -> None:  # noqa: ANN401
        """Mark that it is ready."""

    def begin_taking(self, stream: Any) -> None:  # noqa: ANN401
        """The peer's stream waits until the block is filled."""

    def take(self, offset: int, layout: Layout, to: torch.device, stream: Any) -> Tensor:  # noqa: ANN401
        """A new tensor with what lies at the offset, on the current stream of its device."""

    def taken(self, stream: Any) -> None:  # noqa: ANN401
        """Mark that it is free."""

    def read(self, nbytes: int) -> bytes:
        """The first bytes, now; this waits for the device."""

    def write(self, data: bytes) -> None:
        """Set the first bytes, now; this waits for the device."""

    def is_behind(self) -> bool:
        """Whether streams of this process wait for a mark of the other one."""

    def abandon(self) -> None:
        """The other process has ended: let streams go on. What it has not filled is all ones."""

    def release(self) -> None:
        """Free or unmap the memory, once no work of this process uses it."""


class DeviceDriver(Protocol):
    """The devices of one kind in this process."""

    kind: str
    """the type of their torch.device"""

    def uuid_of(self, device: torch.device) -> str:
        """The name of a device that is the same in all processes."""

    def device_with(self, uuid: str) -> torch.device | None:
        """The device of this process with that name."""

    types: tuple[type[Tensor], ...]
    """the classes of tensors that it can copy"""

    def current_stream(self, device: torch.device) -> object:
        """The stream on which this thread queues work of a device."""

    def using(self, stream: Any) -> AbstractContextManager[object]:  # noqa: ANN401
        """Make a stream current for its device."""

    def on_default_streams(self) -> AbstractContextManager[object]:
        """Make the default stream of each device current, for the calling thread."""

    def handoff(self, tensor: Tensor) -> Callable[[], None]:
        """To be called before another thread or stream uses the tensor.

        The stream that is current then waits for what is queued on the present one.
        """

    def check_not_capturing(self) -> None:
        """UsageError if the work of this thread is being captured, not queued."""

    def budget_of(self, device: torch.device) -> int:
        """How many bytes of the device blocks for one peer may take."""

    def make(self, device: torch.device, room: int, marks: Marks) -> DeviceBlock:
        """Allocate a block; DeviceError if the device has no memory for it."""

    def open(self, device: torch.device, room: int, handle: bytes, marks: Marks) -> DeviceBlock:
        """Map a peer's block. The handle comes from a peer, and its length is checked here."""
