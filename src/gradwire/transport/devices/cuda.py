"""The device lane of CUDA: plain device allocations, exported once by CUDA IPC.

Memory, copies and marks use `cuda.bindings`, which torch's CUDA wheels bring along.
Blocks are not taken from torch's allocator: to export one of its tensors would map the whole
segment, with tensors of others in it, writable for the peer. Received data is copied into ordinary
tensors of torch's allocator, which knows on which streams they are used.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from mmap import PAGESIZE
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.errors import BadMessage, UsageError
from gradwire.torch_private import NOTHING, raw_stream
from gradwire.transport.devices.contract import DeviceError
from gradwire.transport.devices.words import FREE, READY, USE, Marks, Words
from gradwire.wire.tensor import Layout

_HANDLE_BYTES = 64
_AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ: until the mark is this number, or a later one"""
_NO_CONTEXT = 201
_PAUSE = 0.001
_SHARE_OF_MEMORY = 16
"""blocks for one peer take at most this part of a device's memory"""


class _Cuda(NamedTuple):
    """Modules of cuda.bindings."""

    runtime: Any
    driver: Any

    @contextmanager
    def fresh_stream(self) -> Iterator[int]:
        """A stream that waits for no other; afterwards its work is done."""
        stream = _checked(
            self.runtime.cudaStreamCreateWithFlags(self.runtime.cudaStreamNonBlocking)
        )
        try:
            yield int(stream)
            _checked(self.runtime.cudaStreamSynchronize(stream))
        finally:
            self.runtime.cudaStreamDestroy(stream)


@final
class CudaBlock:
    """A block that this process has allocated, or opened by its handle."""

    def __init__(
        self,
        cuda: _Cuda,
        device: torch.device,
        room: int,
        pointer: int,
        marks: Marks,
        *,
        is_own: bool,
    ) -> None:
        self._cuda, self.device, self.room, self._pointer = cuda, device, room, pointer
        self._marks, self._is_own, self._is_only = marks, is_own, len(_by_uuid()) == 1
        page = _pinned(cuda.runtime, marks.words)
        self._places = [page + marks.offset_of(which) for which in (USE, READY, FREE)]
        self._filled = self._taken = 0
        """the uses that this process has filled, or has taken out"""
        self._awaited = 0
        """the latest use that streams here need of the other process"""
        self._copies = cuda.runtime.cudaMemcpyKind.cudaMemcpyDefault
        self._copying = cuda.runtime.cudaMemcpyAsync
        self._marking = cuda.driver.cuStreamWriteValue32
        which = READY if is_own else FREE
        with cuda.fresh_stream() as stream:  # an error, if this device cannot write marks
            self._queue(self._marking, stream, self._places[which], marks[which], 0)

    @property
    def handle(self) -> bytes:
        """For the peer to open it."""
        handle: bytes = _checked(self._cuda.runtime.cudaIpcGetMemHandle(self._pointer)).reserved
        return handle

    def begin(self, stream: torch.cuda.Stream, *, was_taken: bool) -> None:
        """The owner's stream waits until the block may be overwritten."""
        marks = self._marks
        if was_taken:
            self._awaited = marks[USE]
        else:
            self._wait(READY, self._filled, stream)
        self._wait(FREE, self._awaited, stream)
        marks[USE] += 1

    def fill(self, offset: int, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Copy a contiguous tensor of this device into the block."""
        self._copy(self._pointer + offset, tensor.data_ptr(), tensor.nbytes, stream)
        tensor.record_stream(stream)  # it may have been allocated on another, and be freed now

    def filled(self, stream: torch.cuda.Stream) -> None:
        """Mark that it is ready."""
        self._filled = self._marks[USE]
        self._queue(self._marking, stream.cuda_stream, self._places[READY], self._filled, 0)

    def begin_taking(self, stream: torch.cuda.Stream) -> None:
        """The peer's stream waits until the block is filled."""
        self._taken = self._marks[USE]
        if not self._is_own:  # else the peer is a worker of this process
            self._awaited = self._taken
        self._wait(READY, self._taken, stream)

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
        """Mark that it is free."""
        self._queue(self._marking, stream.cuda_stream, self._places[FREE], self._taken, 0)

    def read(self, nbytes: int) -> bytes:
        """The first bytes, now; this waits for the device."""
        found = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        _checked(
            self._cuda.runtime.cudaMemcpy(found.data_ptr(), self._pointer, nbytes, self._copies)
        )
        return found.numpy().tobytes()

    def write(self, data: bytes) -> None:
        """Set the first bytes, now; this waits for the device."""
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        copy = self._cuda.runtime.cudaMemcpy
        _checked(copy(self._pointer, source.data_ptr(), len(data), self._copies))
        # From pageable memory the copy may return before the device has the bytes, and another
        # process would read what was there before. Reading back ends after it.
        self.read(len(data))

    def is_behind(self) -> bool:
        """Whether streams of this process wait for a mark of the other one."""
        return not self._marks.has_come(FREE if self._is_own else READY, self._awaited)

    def abandon(self) -> None:
        """The other process has ended: let streams go on. What it has not filled is all ones."""
        if not self._is_own:
            with torch.cuda.device(self.device), self._cuda.fresh_stream() as stream:
                fill = self._cuda.runtime.cudaMemsetAsync
                _checked(fill(self._pointer, 0xFF, self.room, stream))
        self._marks[FREE if self._is_own else READY] = self._awaited

    def release(self) -> None:
        """Free or unmap the memory, once no work of this process uses it."""
        which, number = (READY, self._filled) if self._is_own else (FREE, self._taken)
        while not self._marks.has_come(which, number):
            time.sleep(_PAUSE)
        runtime = self._cuda.runtime
        with torch.cuda.device(self.device):
            close = runtime.cudaFree if self._is_own else runtime.cudaIpcCloseMemHandle
            _checked(close(self._pointer))

    def _copy(self, to: int, source: int, nbytes: int, stream: torch.cuda.Stream) -> None:
        self._queue(self._copying, to, source, nbytes, self._copies, stream.cuda_stream)

    def _wait(self, which: int, number: int, stream: torch.cuda.Stream) -> None:
        """Let a stream wait until a mark has come so far. hot: every block"""
        if not self._marks.has_come(which, number):
            wait, index = self._cuda.driver.cuStreamWaitValue32, self.device.index
            self._queue(self._cuda.runtime.cudaSetDevice, index)  # this thread may be a new one
            self._queue(wait, stream.cuda_stream, self._places[which], number, _AT_LEAST)

    def _queue(self, call: Callable[..., Any], *args: Any) -> None:  # noqa: ANN401
        """Ask for work of this device: a default stream is that of the current one. hot"""
        if self._is_only:
            (error,) = call(*args)
        else:
            with torch.cuda.device(self.device):
                (error,) = call(*args)
        if int(error) == _NO_CONTEXT:  # a copy has failed before, and this thread is new
            with torch.cuda.device(self.device):
                _checked(self._cuda.runtime.cudaSetDevice(self.device.index))
                (error,) = call(*args)
        if int(error):
            raise DeviceError(f"CUDA says {error}")


@final
class CudaDriver:
    """The CUDA devices of this process."""

    kind = "cuda"
    types: tuple[type[Tensor], ...] = (Tensor, Parameter)

    def __init__(self, runtime: Any, driver: Any) -> None:  # noqa: ANN401
        self._cuda = _Cuda(runtime, driver)
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

    def make(self, device: torch.device, room: int, marks: Marks) -> CudaBlock:
        """Allocate a block; DeviceError if the device has no memory for it."""
        runtime = self._cuda.runtime
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # creates the context, if there is none
            pointer = _checked(runtime.cudaMalloc(room))
            try:
                _checked(runtime.cudaMemset(pointer, 0, room))  # it may hold others' data
                return CudaBlock(self._cuda, device, room, int(pointer), marks, is_own=True)
            except BaseException:
                runtime.cudaFree(pointer)
                raise

    def open(self, device: torch.device, room: int, handle: bytes, marks: Marks) -> CudaBlock:
        """Map a peer's block. The handle comes from a peer, and its length is checked here."""
        if len(handle) != _HANDLE_BYTES:
            raise BadMessage("a handle of device memory has a wrong length")
        runtime = self._cuda.runtime
        with torch.cuda.device(device):
            torch.cuda.current_stream()
            theirs = runtime.cudaIpcMemHandle_t()
            theirs.reserved = handle
            lazily = runtime.cudaIpcMemLazyEnablePeerAccess
            pointer = _checked(runtime.cudaIpcOpenMemHandle(theirs, lazily))
            try:
                _, known = _checked_pair(self._cuda.driver.cuMemGetAddressRange(pointer))
                if room > known:
                    raise BadMessage(f"a block of {known} bytes was announced as {room}")
                return CudaBlock(self._cuda, device, room, int(pointer), marks, is_own=False)
            except BaseException:
                runtime.cudaIpcCloseMemHandle(pointer)
                raise


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


def _pinned(runtime: Any, words: Words) -> int:  # noqa: ANN401
    """The address of a page for devices, which can write it from now on."""
    if words.unpin is None:
        flags = runtime.cudaHostRegisterPortable | runtime.cudaHostRegisterMapped
        _checked(runtime.cudaHostRegister(words.place, PAGESIZE, flags))
        words.unpin = partial(runtime.cudaHostUnregister, words.place)
    return int(_checked(runtime.cudaHostGetDevicePointer(words.place, 0)))


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
