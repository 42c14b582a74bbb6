"""DeviceLinks: encodes and decodes the tensors of every message, wherever their bytes are.

Tensors on the CPU are views of the payload (wire/tensor.py). A tensor on another device takes its
device lane to the peer if there is one, so that its bytes never leave the device (lanes.py). Else
it is copied to host memory and sent there.

Note [Streams]: a call may return before the device has computed its arguments. What is sent is
copied on the current stream of the thread that sends, and what arrives is copied on the current
stream of the thread that decodes it, so both are in order with the work before and after. Nothing
here waits for the device, except where a tensor arrives in host memory. Functions and engine runs
that peers ask for run on the default streams: all work of a process that other workers ask for is
then in one order, as in one local program, and values kept here need no events. Threads of gradwire
have these streams anyway; a thread of the user may serve while it waits for an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import NamedTuple, final

import torch
from msgspec.structs import replace
from torch import Tensor

from gradwire.agent.agent import Agent
from gradwire.agent.devices.lanes import IncomingLane, Lease, OutgoingLane, Taking, aligned
from gradwire.agent.devices.maps import CPU, DeviceMap, no_map, split_name, unmapped
from gradwire.agent.messages import BlockOpened, OpenBlock
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.current import current_inbound
from gradwire.errors import BadMessage, GradwireError, PeerLost
from gradwire.ids import WorkerId
from gradwire.torch_private import NOTHING
from gradwire.transport.devices.contract import DeviceDriver, DeviceError, Layout
from gradwire.transport.devices.cuda import cuda_device_with, cuda_driver
from gradwire.transport.devices.words import UNREAD
from gradwire.wire.message import Buffer
from gradwire.wire.tensor import (
    META,
    Placement,
    TensorHeader,
    decode_tensors,
    encode_tensors,
)

_MOST_NAMES = 256
"""that peers have given to devices of this worker: a peer may use a new one each time"""
Encoded = tuple[list[TensorHeader], list[Buffer]]
Drivers = Callable[[str], DeviceDriver | str]
"""the driver of a type of device, or why there is none"""


Handoff = Callable[[], None]
"""makes the current streams of the thread that calls it wait for tensors of another one"""


class Home(NamedTuple):
    """Where a tensor was that has left: its device, and the stream that was current there."""

    device: torch.device
    stream: object = None
    using: Callable[[], AbstractContextManager[object]] | None = None
    """makes the stream current"""


ON_CPU = Home(torch.device(CPU))


def drivers_of_this_process(kind: str) -> DeviceDriver | str:
    """The driver for a type of torch.device."""
    return cuda_driver() if kind == "cuda" else f"{kind} devices have no lane"


class _OwnDevice(NamedTuple):
    """A device of this worker, as it is named in device maps and, without one, in messages."""

    text: str
    name: str
    types: tuple[type[Tensor], ...]
    """the classes of tensors that its driver can copy"""


@final
class DeviceLinks:
    """The tensors of one worker's messages."""

    def __init__(
        self, agent: Agent, drivers: Drivers = drivers_of_this_process, *, needs_map: bool = False
    ) -> None:
        self._agent, self._drivers, self._limits = agent, drivers, agent.limits
        self._needs_map = needs_map
        self._lock = agent.directory.lock
        self._outgoing: dict[WorkerId, OutgoingLane] = {}
        self._incoming: dict[WorkerId, IncomingLane] = {}
        self._own_devices: dict[torch.device, _OwnDevice] = {}
        self._known_names: dict[str, torch.device] = {}
        """those of devices that peers have named in messages"""
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            agent.dispatch.run_guests_inside(partial(self._default_streams, accelerator.type))
        agent.kinds.add(BlockOpened)
        agent.handle(OpenBlock, self._serve_open, Lane.SERVICE)
        agent.on_peer_lost(self._peer_lost)

    def _default_streams(self, kind: str) -> AbstractContextManager[object]:
        """See Note [Streams]: what is served on a user's thread must not use that thread's."""
        if kind == "cuda" and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return NOTHING  # and do not ask the driver, which would begin to use CUDA
        driver = self._drivers(kind)
        return NOTHING if isinstance(driver, str) else driver.on_default_streams()

    # -- encoding

    def encode(
        self,
        tensors: Sequence[Tensor],
        to: WorkerId,
        deadline: float,
        device_map: DeviceMap | None = None,
        is_call: bool | None = None,
    ) -> Encoded:
        """Encode the tensors of a message to this peer.

        `is_call` is None for gradients: their receiver knows on which devices they arrive.
        """
        maps = device_map or {}
        placements = [self._placed(tensor, to, maps, is_call) for tensor in tensors]
        lanes = list(map(_maybe_lane, tensors, placements))
        sizes: dict[torch.device, int] = {}
        for tensor, lane in zip(tensors, lanes, strict=True):
            if lane is not None:
                sizes[lane] = sizes.get(lane, 0) + aligned(tensor.numel() * tensor.itemsize)
        leases: dict[torch.device | None, Lease] = {}
        try:
            for device, size in sizes.items():
                lease = self._lease(device, size, to, deadline)
                if lease is not None:
                    leases[device] = lease
            carried = zip(placements, lanes, strict=True)
            placements = [place._replace(lease=leases.get(lane)) for place, lane in carried]
            encoded = encode_tensors(tensors, self._limits, placements)
            for lease in leases.values():
                lease.close()
        except BaseException as error:
            for lease in leases.values():
                self._outgoing[to].give_back(lease.number)
            if isinstance(error, DeviceError):
                raise GradwireError(f"a tensor could not be copied for sending: {error}") from error
            raise
        return encoded

    def _placed(
        self, tensor: Tensor, to: WorkerId, device_map: DeviceMap, is_call: bool | None
    ) -> Placement:
        """On which device a tensor arrives, see maps.py; and whether a driver can copy it."""
        if tensor.is_cpu:
            mapped = device_map.get(CPU, CPU)
            return Placement("" if mapped == CPU else mapped)
        own = self._own(tensor.device)
        is_plain = type(tensor) in own.types
        if own.text in device_map:
            mapped = device_map[own.text]
            return Placement("" if mapped == CPU else mapped, None, is_plain)
        if self._needs_map and is_call is not None and not tensor.is_meta:
            raise RuntimeError(no_map(is_call, self._agent.directory.name(to), own.text))
        return Placement(own.name, None, is_plain)

    def _own(self, device: torch.device) -> _OwnDevice:
        own = self._own_devices.get(device)
        if own is None:
            driver = "" if device.type == META else self._drivers(device.type)
            text = name = str(device)
            types: tuple[type[Tensor], ...] = ()
            if not isinstance(driver, str):
                name, types = unmapped(text, driver.uuid_of(device)), driver.types
            own = self._own_devices[device] = _OwnDevice(text, name, types)
        return own

    def _lease(
        self, device: torch.device, size: int, to: WorkerId, deadline: float
    ) -> Lease | None:
        driver = self._drivers(device.type)
        if isinstance(driver, str):
            return None
        driver.check_not_capturing()
        lane = self._outgoing.get(to)
        if lane is None:
            name = self._agent.directory.name
            about = f"{self._agent.directory.me.name} to {name(to)}"
            with self._lock:
                lane = self._outgoing.get(to)
                if lane is None:
                    lane = OutgoingLane(partial(self._ask_to_open, to), self._lock, about)
                    self._outgoing[to] = lane
        return lane.lease(driver, device, size, deadline)

    def _ask_to_open(self, to: WorkerId, message: OpenBlock, deadline: float) -> BlockOpened:
        what = "sharing device memory"
        _, promise = self._agent.request(
            to, message, deadline=deadline, description=what, inbound=current_inbound()
        )
        outcome = self._agent.wait_for(to, promise)
        if isinstance(outcome, Exception):
            raise outcome
        if not isinstance(outcome.message, BlockOpened):
            raise BadMessage(f"OpenBlock was answered by {type(outcome.message).__name__}")
        return outcome.message

    def withdraw(self, headers: Sequence[TensorHeader], to: WorkerId) -> None:
        """The message did not leave: its blocks may be used again."""
        lane = self._outgoing.get(to)
        for header in headers:
            if header.block is not None and lane is not None:
                lane.give_back(header.block[0])

    # -- decoding

    def decode(
        self, headers: Sequence[TensorHeader], payload: memoryview | None, source: WorkerId
    ) -> list[Tensor]:
        """Decode the tensors of a message from this peer."""
        taking = Taking(self._incoming_of(source), self._stream_of)
        arriving = _Arriving(taking, self._drivers, self._known_names)
        try:
            return decode_tensors(headers, payload, self._limits, arriving)
        except DeviceError as error:
            raise GradwireError(f"a tensor could not be copied on arrival: {error}") from error
        finally:
            taking.close(_blocks_in(headers))

    def decode_at(
        self,
        headers: Sequence[TensorHeader],
        payload: memoryview | None,
        source: WorkerId,
        homes: Sequence[Home],
    ) -> list[Tensor]:
        """Decode gradients where their tensors were; the current streams wait for them there."""
        names = ["" if home.device.type == CPU else str(home.device) for home in homes]
        at_home = [
            header if header.device == META else replace(header, device=name)
            for header, name in zip(headers, names, strict=True)
        ]
        elsewhere = [
            home.using
            for home in homes
            if home.using is not None and self._stream_of(home.device) != home.stream
        ]
        if not elsewhere:
            return self.decode(at_home, payload, source)
        with ExitStack() as stack:
            for using in elsewhere:
                stack.enter_context(using())
            tensors = self.decode(at_home, payload, source)
            join = self.handoff(tensors)
        if join is not None:
            join()
        return tensors

    def homes_of(self, tensors: Sequence[Tensor]) -> tuple[Home, ...]:
        """Where these tensors are."""
        return tuple([self._home_on(tensor.device) for tensor in tensors])

    def _stream_of(self, device: torch.device) -> object:
        driver = self._drivers(device.type)
        return None if isinstance(driver, str) else driver.current_stream(device)

    def _home_on(self, device: torch.device) -> Home:
        """A device, and the current stream of this thread there."""
        driver = self._drivers(device.type)
        if isinstance(driver, str):
            return Home(device)
        stream = driver.current_stream(device)
        return Home(device, stream, partial(driver.using, stream))

    def handoff(self, tensors: Sequence[Tensor]) -> Handoff | None:
        """For another thread or stream: called there, its stream waits for these tensors."""
        joins = []
        for tensor in tensors:
            driver = None if tensor.is_cpu else self._drivers(tensor.device.type)
            if driver is not None and not isinstance(driver, str):
                joins.append(driver.handoff(tensor))
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
                    stack.enter_context(self._default_streams(kind))
                join()

    def _incoming_of(self, source: WorkerId) -> IncomingLane:
        lane = self._incoming.get(source)
        if lane is None:
            with self._lock:
                lane = self._incoming.setdefault(source, IncomingLane(self._lock))
        return lane

    def drop(self, headers: Sequence[TensorHeader], source: WorkerId) -> None:
        """A message is dropped unread: its blocks may be used again."""
        lane = self._incoming.get(source)
        if lane is not None:
            lane.give_back(_blocks_in(headers), UNREAD)

    def _serve_open(self, message: OpenBlock, _: Payload, source: Source) -> None:
        lane = self._incoming_of(source.worker)
        driver = self._drivers(message.kind)
        try:
            if isinstance(driver, str):
                raise DeviceError(f"on the peer, {driver}")
            opened = lane.open(message, driver)
        except (DeviceError, OSError, BadMessage) as error:
            opened = BlockOpened(b"", 0, str(error))
        self._agent.check_asker(source)  # else nobody would unmap it
        self._agent.answer(source, opened, deadline=self._agent.clock.now() + 10.0)

    # -- the end of a link

    def _peer_lost(self, worker: WorkerId, _: PeerLost) -> None:
        with self._lock:
            lanes = [self._incoming.pop(worker, None), self._outgoing.pop(worker, None)]
        for lane in lanes:
            if lane is not None:  # on another thread, as it waits for the device
                self._agent.dispatch.service.submit_or_run(lane.close)

    def close(self) -> None:
        """This worker is closed."""
        with self._lock:
            incoming, self._incoming = self._incoming, {}
            outgoing, self._outgoing = self._outgoing, {}
        for arriving in incoming.values():
            arriving.close()
        for leaving in outgoing.values():
            leaving.close()


def _maybe_lane(tensor: Tensor, place: Placement) -> torch.device | None:
    """The device whose lane can carry a tensor to its place; None if it goes through the host."""
    if not place.is_plain or not place.device or tensor.layout is not torch.strided:
        return None
    return tensor.device if tensor.numel() else None


def _blocks_in(headers: Sequence[TensorHeader]) -> set[int]:
    return {header.block[0] for header in headers if header.block is not None}


@final
class _Arriving:
    """The devices of one message that is decoded."""

    def __init__(self, taking: Taking, drivers: Drivers, known: dict[str, torch.device]) -> None:
        self._taking, self._drivers, self._known = taking, drivers, known

    def take(self, header: TensorHeader, strides: list[int], dtype: torch.dtype) -> Tensor:
        """A tensor that lies in a block."""
        assert header.block is not None
        nbytes = math.prod(header.shape) * dtype.itemsize
        layout = Layout(header.shape, strides, dtype, nbytes)
        device = self._known.get(header.device) or self._device(header.device)
        return self._taking.take(header.block, layout, device)

    def place(self, tensor: Tensor, name: str) -> Tensor:
        """A copy on the device of this name of a tensor that came in host memory."""
        try:
            return tensor.to(self._known.get(name) or self._device(name))
        except RuntimeError as error:
            raise BadMessage(f"a tensor could not be placed on {name}: {error}") from error

    def _device(self, name: str) -> torch.device:
        found = self._maybe_device(name)
        if found is not None:
            if len(self._known) < _MOST_NAMES:
                self._known[name] = found
            return found
        device, uuid = split_name(name)
        where = f"the sender's {device} ({uuid})" if uuid else device
        raise BadMessage(
            f"a tensor of {where} arrived, but this worker does not see that device",
            hint="say by Options(device_maps=…) or device_map= on which device it should arrive, "
            "or send tensor.cpu()",
        )

    def _maybe_device(self, name: str) -> torch.device | None:
        if not name:
            return torch.device(CPU)
        device, uuid = split_name(name)
        if not uuid:
            return torch.device(device) if device in _own_devices() else None
        driver = self._drivers(device.partition(":")[0])
        find = cuda_device_with if isinstance(driver, str) else driver.device_with
        return find(uuid)


def _own_devices() -> list[str]:
    kind = torch.accelerator.current_accelerator()
    count = 0 if kind is None else torch.accelerator.device_count()
    return [f"{kind}:{index}" for index in range(count)]
