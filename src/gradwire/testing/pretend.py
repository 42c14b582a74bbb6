"""Pretended devices: tensors of "pretend:0", "pretend:1", … that lie in host memory.

An operator on such a tensor is queued on the current stream of the calling thread and runs later,
as on a GPU. Each stream runs its work in order; the order among streams comes from a seed, and is
limited only by events. So a wait that is missing somewhere shows as a wrong value, on any machine.
Memory that is freed is overwritten on the stream that it was allocated on, as if that stream had
used it again: a missing `record_stream` shows, too.

`PretendDriver` shares pretended memory between the workers of one process, by the contract of
transport/devices/base.py.

    torch device   thread-local current stream   Stream: queue of work, records and waits
                                                      |
                   synchronize(), .cpu(), .item() ----+--> run it, and what it waits for
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map_only

from gradwire.transport.devices.base import BlockHandles

KIND = "pretend"
DEVICES = 2
_GARBAGE = 0x7B
_EAGERNESS = 0.3
"""how often something runs when an operator is queued"""
_lock = threading.RLock()
_order = random.Random(0)
_HANDLES = BlockHandles(b"", b"", b"")


class Recorded:
    """One recording of an event; done when its stream has come so far."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.is_done = stream, False


@final
class Event:
    """Marks a place in the work of a stream. A wait is for the latest record; none, no wait."""

    def __init__(self) -> None:
        self._latest: Recorded | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record it on a stream."""
        stream = stream or current_stream()
        recorded = self._latest = Recorded(stream)

        def mark() -> None:
            recorded.is_done = True

        stream.queue(mark)

    @property
    def latest(self) -> Recorded | None:
        """What a wait that begins now waits for."""
        return self._latest


@final
class Stream:
    """Work of one device, in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._work: deque[Callable[[], None] | Recorded] = deque()
        with _lock:
            _streams.append(self)

    def queue(self, work: Callable[[], None]) -> None:
        """Run this after what is queued already."""
        with _lock:
            self._work.append(work)
            while _order.random() < _EAGERNESS:
                _order.choice(_streams).step()

    def wait_event(self, event: Event) -> None:
        """What is queued from now on runs after the event."""
        if event.latest is not None:
            with _lock:
                self._work.append(event.latest)

    def wait_stream(self, other: Stream) -> None:
        """What is queued from now on runs after what the other stream has now."""
        event = Event()
        event.record(other)
        self.wait_event(event)

    def step(self) -> bool:
        """Run the next work, if there is some that need not wait. With the lock held."""
        if not self._work:
            return False
        work = self._work[0]
        if isinstance(work, Recorded):
            if not work.is_done:
                return False
            self._work.popleft()
            return True
        self._work.popleft()
        work()
        return True

    def synchronize(self) -> None:
        """Run all work of this stream, and only what that waits for."""
        with _lock:
            while self._work:
                if not self.step():
                    waits_for = self._work[0]
                    assert isinstance(waits_for, Recorded)
                    while not waits_for.is_done:
                        _advance(waits_for.stream)


def _advance(stream: Stream) -> None:
    """One step of a stream, or of what it waits for."""
    if not stream.step():
        work = stream._work[0]
        assert isinstance(work, Recorded) and work.stream is not stream, "streams wait in a circle"
        _advance(work.stream)


_streams: list[Stream] = []


class _Current(threading.local):
    def __init__(self) -> None:
        self.streams: dict[torch.device, Stream] = {}


_current = _Current()


@cache
def default_stream(device: torch.device) -> Stream:
    """The stream of a device that all threads use unless they say otherwise."""
    return Stream(device)


def current_stream(device: torch.device | str = f"{KIND}:0") -> Stream:
    """The stream of this thread for a device."""
    device = torch.device(device)
    return _current.streams.get(device) or default_stream(device)


@contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    """Operators of this thread are queued on this stream."""
    before = _current.streams.get(stream.device)
    _current.streams[stream.device] = stream
    try:
        yield
    finally:
        if before is None:
            del _current.streams[stream.device]
        else:
            _current.streams[stream.device] = before


def synchronize() -> None:
    """Run all work of all streams."""
    with _lock:
        for stream in list(_streams):
            stream.synchronize()


class _Allocation:
    """The memory of a tensor and its views; overwritten when the last of them is gone."""

    def __init__(self, memory: Tensor, stream: Stream) -> None:
        self.stream = stream
        self.used_on: list[Stream] = []
        weakref.finalize(self, _overwrite, memory.untyped_storage(), stream, self.used_on)


def _overwrite(storage: torch.UntypedStorage, stream: Stream, used_on: list[Stream]) -> None:
    with _lock:
        for other in used_on:
            if other is not stream:
                stream.wait_stream(other)
        stream._work.append(lambda: storage.fill_(_GARBAGE))


class PretendTensor(Tensor):
    """A tensor of a pretended device. `inner` is its memory, filled when its stream gets there."""

    inner: Tensor
    allocation: _Allocation

    @staticmethod
    def __new__(
        cls, inner: Tensor, device: torch.device, allocation: _Allocation
    ) -> PretendTensor:
        """A tensor with the sizes of `inner`."""
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )

    def __init__(self, inner: Tensor, _: torch.device, allocation: _Allocation) -> None:
        self.inner, self.allocation = inner, allocation

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"PretendTensor({self.shape}, {self.device})"

    def record_stream(self, stream: Any) -> None:  # noqa: ANN401
        """Its memory is in use on this stream until what is queued there now is over."""
        self.allocation.used_on.append(stream)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Queue an operator on the current stream."""
        return _dispatch(func, tuple(args), kwargs or {})


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> PretendTensor:
    """A tensor whose memory holds garbage."""
    return _allocated(torch.empty(tuple(shape), dtype=dtype, device="cpu"), device)


def _allocated(memory: Tensor, device: torch.device) -> PretendTensor:
    memory.untyped_storage().fill_(_GARBAGE)
    return PretendTensor(memory, device, _Allocation(memory, current_stream(device)))


def put(tensor: Tensor, device: str | torch.device = f"{KIND}:0") -> PretendTensor:
    """A copy of a CPU tensor on a pretended device."""
    device, snapshot = torch.device(device), tensor.detach().clone()
    found = _allocated(torch.empty_like(snapshot), device)
    inner = found.inner
    current_stream(device).queue(lambda: inner.copy_(snapshot))
    return found


def _inner(value: Any) -> Any:  # noqa: ANN401
    return tree_map_only(PretendTensor, lambda tensor: tensor.inner, value)


def _device_in(args: Any, kwargs: dict[str, Any]) -> torch.device | None:  # noqa: ANN401
    """The device of the result: the one asked for, or that of the first tensor with a dimension."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    ours = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PretendTensor)]
    return next((leaf.device for leaf in ours if leaf.dim()), ours[0].device if ours else None)


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    device = _device_in(args, kwargs)
    if func is torch.ops.aten.record_stream.default:
        return None
    if device is None or device.type != KIND:
        return _to_host(func, args, kwargs)
    if func is torch.ops.aten.copy_.default and isinstance(args[0], PretendTensor):
        return _copied(args[0], args[1])
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func.is_view:
        base: PretendTensor = args[0]
        view = func(*_inner(args), **_inner(kwargs))
        return tree_map_only(Tensor, lambda t: PretendTensor(t, device, base.allocation), view)
    return _queued(func, args, kwargs, device)


def _to_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """An operator whose result is in host memory: the current streams are waited for."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, PretendTensor):
            current_stream(leaf.device).synchronize()
    return func(*_inner(args), **_inner(kwargs))


def _copied(to: PretendTensor, source: Tensor) -> PretendTensor:
    """copy_(), also from the host, and from another device as torch does it."""
    if not isinstance(source, PretendTensor):
        snapshot, into = source.detach().clone(), to.inner
        current_stream(to.device).queue(lambda: into.copy_(snapshot))
        return to
    memory, into = source.inner, to.inner
    here, there = current_stream(source.device), current_stream(to.device)
    if here is not there:
        there.wait_stream(here)
    there.queue(lambda: into.copy_(memory))
    if here is not there:
        here.wait_stream(there)
    return to


def _queued(
    func: Any,  # noqa: ANN401
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
) -> Any:  # noqa: ANN401
    inner_args, inner_kwargs = _inner(args), _inner(kwargs)
    stream = current_stream(device)
    if func._schema.is_mutable:
        stream.queue(lambda: func(*inner_args, **inner_kwargs))
        return args[0] if args else kwargs["out"]
    try:
        on_meta = tree_map_only(Tensor, lambda t: t.to("meta"), (inner_args, inner_kwargs))
        if "device" in kwargs:
            on_meta[1]["device"] = torch.device("meta")
        shapes = func(*on_meta[0], **on_meta[1])
    except (RuntimeError, NotImplementedError):  # its result depends on values
        stream.synchronize()
        results = func(*inner_args, **inner_kwargs)
        return tree_map_only(Tensor, lambda t: _filled(t, device), results)
    outputs = tree_map_only(Tensor, lambda t: _allocated(_like(t), device), shapes)
    flat = [leaf.inner for leaf in tree_leaves(outputs) if isinstance(leaf, PretendTensor)]

    def run() -> None:
        made = tree_leaves(func(*inner_args, **inner_kwargs))
        for into, result in zip(flat, [m for m in made if isinstance(m, Tensor)], strict=True):
            into.copy_(result)

    stream.queue(run)
    return outputs


def _like(meta: Tensor) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device="cpu")


def _filled(result: Tensor, device: torch.device) -> PretendTensor:
    found = _allocated(torch.empty_like(result), device)
    found.inner.copy_(result)
    return found


@final
class PretendBlock:
    """A block of pretended device memory, shared by the workers of this process."""

    handles = _HANDLES

    def __init__(self, device: torch.device, room: int) -> None:
        self.device, self.room = device, room
        self._memory = torch.full((room,), _GARBAGE, dtype=torch.uint8, device="cpu")
        self._ready, self._free = Event(), Event()

    def begin(self) -> None:
        """The owner's current stream waits until the block may be overwritten."""
        stream = current_stream(self.device)
        stream.wait_event(self._ready)
        stream.wait_event(self._free)

    def fill(self, offset: int, tensor: Tensor) -> None:
        """Copy a contiguous tensor of this device into the block."""
        assert isinstance(tensor, PretendTensor)
        stream, source = current_stream(self.device), tensor.inner
        into = self._memory[offset : offset + tensor.nbytes]
        stream.queue(lambda: into.copy_(source.reshape(-1).view(torch.uint8)))
        tensor.record_stream(stream)

    def filled(self) -> None:
        """Record `ready`."""
        self._ready.record(current_stream(self.device))

    def begin_taking(self) -> None:
        """The peer's current stream waits until the block is filled."""
        current_stream(self.device).wait_event(self._ready)

    def take(self, offset: int, numel: int, dtype: torch.dtype, to: torch.device) -> Tensor:
        """A new flat tensor with what lies at the offset."""
        source = self._memory[offset : offset + numel * dtype.itemsize].view(dtype)
        stream = current_stream(self.device)
        if to.type == "cpu":
            stream.synchronize()
            return source.clone()
        tensor, theirs = empty((numel,), dtype, to), current_stream(to)
        if theirs is not stream:
            stream.wait_stream(theirs)
        inner = tensor.inner
        stream.queue(lambda: inner.copy_(source))
        if theirs is not stream:
            theirs.wait_stream(stream)
            tensor.record_stream(stream)
        return tensor

    def taken(self) -> None:
        """Record `free`."""
        self._free.record(current_stream(self.device))

    def read(self, nbytes: int) -> bytes:
        """The first bytes, now."""
        return self._memory[:nbytes].numpy().tobytes()

    def write(self, data: bytes) -> None:
        """Set the first bytes, now."""
        self._memory[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)

    def release(self) -> None:
        """Garbage from now on."""
        self._memory.fill_(_GARBAGE)


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

    def budget_of(self, _: torch.device) -> int:
        """How many bytes of the device blocks for one peer may take."""
        return self._budget

    def make(self, device: torch.device, room: int) -> PretendBlock:
        """Allocate a block."""
        return PretendBlock(device, room)

    def open(self, device: torch.device, room: int, handles: BlockHandles) -> PretendBlock:
        """Not possible: pretended memory is not shared between processes."""
        raise AssertionError("pretended devices are shared inside of one process only")


class _Module:
    """What torch asks of the module of a device type."""

    def is_initialized(self) -> bool:
        return False

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return DEVICES

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


@cache
def install() -> None:
    """Make torch know the device type. It stays known for the life of the process."""
    backend_registration._setup_privateuseone_for_python_backend(KIND, _Module())
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)

    def make(shape: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:  # noqa: ANN401
        return empty(shape, dtype or torch.get_default_dtype(), torch.device(device))

    def make_strided(
        shape: Any,  # noqa: ANN401
        stride: Any,  # noqa: ANN401
        dtype: Any = None,  # noqa: ANN401
        device: Any = None,  # noqa: ANN401
        **_: Any,  # noqa: ANN401
    ) -> Tensor:
        kind = dtype or torch.get_default_dtype()
        memory = torch.empty_strided(shape, stride, dtype=kind, device="cpu")
        return _allocated(memory, torch.device(device))

    library.impl("empty.memory_format", make, "PrivateUse1")
    library.impl("empty_strided", make_strided, "PrivateUse1")


_libraries: list[torch.library.Library] = []


def shuffle(seed: int) -> None:
    """Begin a new order of work among streams."""
    with _lock:
        _order.seed(seed)
