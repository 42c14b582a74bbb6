"""The device lane of CUDA: plain device allocations, exported once by CUDA IPC.

Memory and copies use `cuda.bindings`, which torch's CUDA wheels bring along; events are torch's.
Blocks are not taken from torch's allocator: to export one of its tensors would map the whole
segment, with tensors of others in it, writable for the peer. Received data is copied into ordinary
tensors of torch's allocator, which knows on which streams they are used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.errors import BadMessage, UsageError
from gradwire.torch_private import NOTHING, raw_stream
from gradwire.transport.devices.contract import BlockHandles, DeviceError
from gradwire.wire.tensor import Layout

_HANDLE_BYTES = 64
_SHARE_OF_MEMORY = 16
"""blocks for one peer take at most this part of a device's memory"""


@final
class CudaBlock:
    """A block that this process has allocated, or opened by its handles."""

    def __init__(
        self,
        runtime: Any,  # noqa: ANN401  # the module cuda.bindings.runtime
        device: torch.device,
        room: int,
        pointer: int,
        events: tuple[torch.cuda.Event, torch.cuda.Event],
        *,
        is_own: bool,
    ) -> None:
        self._runtime, self.device, self.room = runtime, device, room
        self._pointer, (self._ready, self._free) = pointer, events
        self._is_own = is_own
        self._copies = runtime.cudaMemcpyKind.cudaMemcpyDefault
        self._queue_copy = runtime.cudaMemcpyAsync

    @property
    def handles(self) -> BlockHandles:
        """For the peer to open it."""
        memory = _checked(self._runtime.cudaIpcGetMemHandle(self._pointer)).reserved
        return BlockHandles(memory, _handle_of(self._ready), _handle_of(self._free))

    def begin(self, stream: torch.cuda.Stream, *, was_taken: bool) -> None:
        """The owner's stream waits until the block may be overwritten."""
        stream.wait_event(self._free if was_taken else self._ready)

    def fill(self, offset: int, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Copy a contiguous tensor of this device into the block."""
        self._copy(self._pointer + offset, tensor.data_ptr(), tensor.nbytes, stream)
        tensor.record_stream(stream)  # it may have been allocated on another, and be freed now

    def filled(self, stream: torch.cuda.Stream) -> None:
        """Record `ready`."""
        self._ready.record(stream)

    def begin_taking(self, stream: torch.cuda.Stream) -> None:
        """The peer's stream waits until the block is filled."""
        stream.wait_event(self._ready)

    def take(
        self, offset: int, layout: Layout, to: torch.device, stream: torch.cuda.Stream
    ) -> Tensor:
        """A new tensor with what lies at the offset, on the current stream of its device."""
        shape, strides, dtype, nbytes = layout
        source = self._pointer + offset
        if to == self.device:  # most tensors
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device=to)
            self._copy(tensor.data_ptr(), source, nbytes, stream)
            return tensor
        on_host = to.type == "cpu"
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device=to, pin_memory=on_host)
        if on_host:
            self._copy(tensor.data_ptr(), source, nbytes, stream)
            stream.synchronize()  # it has no stream: its bytes must be there
            return tensor
        # `free` can only be recorded on a stream of the block's device, so the copy runs there.
        theirs = torch.cuda.current_stream(to)
        stream.wait_stream(theirs)  # its memory may be in use there still
        self._copy(tensor.data_ptr(), source, nbytes, stream)
        tensor.record_stream(stream)
        theirs.wait_stream(stream)
        return tensor

    def taken(self, stream: torch.cuda.Stream) -> None:
        """Record `free`."""
        self._free.record(stream)

    def read(self, nbytes: int) -> bytes:
        """The first bytes, now; this waits for the device."""
        found = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        _checked(self._runtime.cudaMemcpy(found.data_ptr(), self._pointer, nbytes, self._copies))
        return found.numpy().tobytes()

    def write(self, data: bytes) -> None:
        """Set the first bytes, now; this waits for the device."""
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        copy = self._runtime.cudaMemcpy
        _checked(copy(self._pointer, source.data_ptr(), len(data), self._copies))

    def release(self) -> None:
        """Free or unmap the memory, once no work of this process uses it."""
        with torch.cuda.device(self.device):
            (self._ready if self._is_own else self._free).synchronize()
            close = self._runtime.cudaFree if self._is_own else self._runtime.cudaIpcCloseMemHandle
            _checked(close(self._pointer))

    def _copy(self, to: int, source: int, nbytes: int, stream: torch.cuda.Stream) -> None:
        (error,) = self._queue_copy(to, source, nbytes, self._copies, stream.cuda_stream)
        if int(error):
            raise DeviceError(f"CUDA says {error}")


@final
class CudaDriver:
    """The CUDA devices of this process."""

    kind = "cuda"
    types: tuple[type[Tensor], ...] = (Tensor, Parameter)

    def __init__(self, runtime: Any, driver: Any) -> None:  # noqa: ANN401
        self._runtime, self._memory_range = runtime, driver.cuMemGetAddressRange
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}
        """by device and handle: torch takes long to make the object anew"""

    def uuid_of(self, device: torch.device) -> str:
        """The name of a device that is the same in all processes."""
        return _uuid(device)

    def device_with(self, uuid: str) -> torch.device | None:
        """The device of this process with that name."""
        return cuda_device_with(uuid)

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream on which this thread queues work of a device. hot: every message"""
        handle = device.index, raw_stream(device.index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.current_stream(device)
        return stream

    def using(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Make a stream current for its device."""
        return torch.cuda.stream(stream)

    def on_default_streams(self) -> AbstractContextManager[object]:
        """Make the default stream of each device current, for the calling thread."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return NOTHING
        others = [device for device in _by_uuid().values() if raw_stream(device.index)]
        return self._on_default_streams(others) if others else NOTHING

    @contextmanager
    def _on_default_streams(self, devices: list[torch.device]) -> Iterator[None]:
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(torch.cuda.stream(torch.cuda.default_stream(device)))
            yield

    def handoff(self, tensor: Tensor) -> Callable[[], None]:
        """See the contract."""
        made_on = torch.cuda.current_stream(tensor.device)
        event = made_on.record_event()

        def join() -> None:
            stream = torch.cuda.current_stream(tensor.device)
            if stream != made_on:
                stream.wait_event(event)
                tensor.record_stream(stream)

        return join

    def check_not_capturing(self) -> None:
        """UsageError if a CUDA graph is being captured."""
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "a CUDA graph is being captured, and a call cannot be a part of it",
                hint="make the call before or after torch.cuda.graph(…)",
            )

    def budget_of(self, device: torch.device) -> int:
        """How many bytes of the device blocks for one peer may take."""
        return torch.cuda.get_device_properties(device).total_memory // _SHARE_OF_MEMORY

    def make(self, device: torch.device, room: int) -> CudaBlock:
        """Allocate a block; DeviceError if the device has no memory for it."""
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream()  # creates the context, if there is none
            pointer = _checked(self._runtime.cudaMalloc(room))
            try:
                ready, free = _new_event(), _new_event()
                block = CudaBlock(
                    self._runtime, device, room, int(pointer), (ready, free), is_own=True
                )
                _checked(self._runtime.cudaMemset(pointer, 0, room))  # it may hold others' data
                block.filled(stream)  # an event has no handle before it was recorded once
                block.taken(stream)
            except BaseException:
                self._runtime.cudaFree(pointer)
                raise
            return block

    def open(self, device: torch.device, room: int, handles: BlockHandles) -> CudaBlock:
        """Map a peer's block. The handles come from a peer, and their lengths are checked here."""
        if any(
            len(handle) != _HANDLE_BYTES for handle in (handles.memory, handles.ready, handles.free)
        ):
            raise BadMessage("a handle of device memory has a wrong length")
        with torch.cuda.device(device):
            torch.cuda.current_stream()
            handle = self._runtime.cudaIpcMemHandle_t()
            handle.reserved = handles.memory
            lazily = self._runtime.cudaIpcMemLazyEnablePeerAccess
            pointer = _checked(self._runtime.cudaIpcOpenMemHandle(handle, lazily))
            try:
                _, known = _checked_pair(self._memory_range(pointer))
                if room > known:
                    raise BadMessage(f"a block of {known} bytes was announced as {room}")
                made: Any = torch.cuda.Event.from_ipc_handle
                events = made(device, handles.ready), made(device, handles.free)
            except BaseException:
                self._runtime.cudaIpcCloseMemHandle(pointer)
                raise
            return CudaBlock(self._runtime, device, room, int(pointer), events, is_own=False)


@cache
def cuda_driver() -> CudaDriver | str:
    """The driver, or why this process has none."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        names = ("cuda.bindings.runtime", "cuda.bindings.driver")
        return CudaDriver(*map(importlib.import_module, names))
    except ImportError as error:
        return f"cuda.bindings cannot be imported: {error}"


def cuda_device_with(uuid: str) -> torch.device | None:
    """The device of this process with that name, also where there is no driver for blocks."""
    return _by_uuid().get(uuid)


@cache
def _by_uuid() -> dict[str, torch.device]:
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", index) for index in range(count)]
    return {_uuid(device): device for device in devices}


@cache
def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _new_event() -> torch.cuda.Event:
    make: Any = torch.cuda.Event
    return make(interprocess=True)  # type: ignore[no-any-return]


def _handle_of(event: Any) -> bytes:  # noqa: ANN401
    handle: bytes = event.ipc_handle()
    return handle


def _checked_pair(result: tuple[Any, ...]) -> tuple[int, int]:
    """The two numbers that a call of cuda.bindings has returned beside its error code."""
    error, first, second = result
    if int(error):
        raise DeviceError(f"CUDA says {error}")
    return int(first), int(second)


def _checked(result: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """The value that a call of cuda.bindings has returned beside its error code."""
    error, *values = result
    if int(error):
        raise DeviceError(f"CUDA says {error}")
    return values[0] if values else None
