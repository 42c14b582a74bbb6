"""DeviceLinks: encodes and decodes the tensors of every message, wherever their bytes are.

Tensors on the CPU are views of the payload (wire/tensor.py). A tensor on another device takes its
device lane to the peer if there is one, so that its bytes never leave the device (lanes.py). Else
it is copied to host memory and sent there.

Note [Streams]: a call may return before the device has computed its arguments. What is sent is
copied on the current stream of the thread that sends, and what arrives is copied on the current
stream of the thread that decodes it, so both are in order with the work before and after. Nothing
here waits for the device, except where a tensor arrives in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import final

import torch
from msgspec.structs import replace
from torch import Tensor

from gradwire.agent.agent import Agent
from gradwire.agent.devices.lanes import IncomingLane, Lease, OutgoingLane, Taking, aligned
from gradwire.agent.devices.maps import CPU, DeviceMap, split_name, unmapped
from gradwire.agent.messages import BlockOpened, OpenBlock
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.current import current_inbound
from gradwire.errors import BadMessage, GradwireError, PeerLost, UsageError
from gradwire.ids import WorkerId
from gradwire.transport.devices.base import DeviceDriver, DeviceError
from gradwire.transport.devices.cuda import cuda_driver
from gradwire.wire.message import Buffer
from gradwire.wire.tensor import (
    META,
    Placement,
    TensorHeader,
    decode_tensors,
    encode_tensors,
)

Encoded = tuple[list[TensorHeader], list[Buffer]]
Drivers = Callable[[str], DeviceDriver | str]
"""the driver of a type of device, or why there is none"""


def drivers_of_this_process(kind: str) -> DeviceDriver | str:
    """The driver for a type of torch.device."""
    return cuda_driver() if kind == "cuda" else f"{kind} devices have no lane"


@final
class DeviceLinks:
    """The tensors of one worker's messages."""

    def __init__(self, agent: Agent, drivers: Drivers = drivers_of_this_process) -> None:
        self._agent, self._drivers, self._limits = agent, drivers, agent.limits
        self._lock = agent.directory.lock
        self._outgoing: dict[WorkerId, OutgoingLane] = {}
        self._incoming: dict[WorkerId, IncomingLane] = {}
        agent.kinds.add(BlockOpened)
        agent.handle(OpenBlock, self._serve_open, Lane.SERVICE)
        agent.on_peer_lost(self._peer_lost)

    # -- encoding

    def encode(
        self,
        tensors: Sequence[Tensor],
        to: WorkerId,
        deadline: float,
        device_map: DeviceMap | None = None,
    ) -> Encoded:
        """Encode the tensors of a message to this peer.

        hot: every message with tensors
        """
        if device_map is None:
            for tensor in tensors:
                if not tensor.is_cpu:
                    break
            else:
                return encode_tensors(tensors, self._limits)
        return self._encode(tensors, to, deadline, device_map or {})

    def _encode(
        self, tensors: Sequence[Tensor], to: WorkerId, deadline: float, device_map: DeviceMap
    ) -> Encoded:
        names = [self._name_there(tensor, device_map) for tensor in tensors]
        sizes: dict[torch.device, int] = {}
        for tensor, name in zip(tensors, names, strict=True):
            if _takes_lane(tensor, name):
                size = aligned(tensor.numel() * tensor.itemsize)
                sizes[tensor.device] = sizes.get(tensor.device, 0) + size
        leases: dict[torch.device, Lease] = {}
        try:
            for device, size in sizes.items():
                lease = self._lease(device, size, to, deadline)
                if lease is not None:
                    leases[device] = lease
            placements = [
                Placement(name, leases.get(tensor.device) if _takes_lane(tensor, name) else None)
                for tensor, name in zip(tensors, names, strict=True)
            ]
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

    def _name_there(self, tensor: Tensor, device_map: DeviceMap) -> str:
        """The name of the device on which a tensor arrives; see maps.py."""
        here = CPU if tensor.is_cpu else str(tensor.device)
        mapped = device_map.get(here)
        if mapped is not None or tensor.is_cpu:
            return "" if mapped in (None, CPU) else str(mapped)
        driver = None if tensor.is_meta else self._drivers(tensor.device.type)
        if driver is None or isinstance(driver, str):
            return here
        return unmapped(here, uuid_of(driver, tensor.device))

    def _lease(
        self, device: torch.device, size: int, to: WorkerId, deadline: float
    ) -> Lease | None:
        driver = self._drivers(device.type)
        if isinstance(driver, str):
            return None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "a CUDA graph is being captured, and a call cannot be a part of it",
                hint="make the call before or after torch.cuda.graph(…)",
            )
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
        """Decode the tensors of a message from this peer.

        hot: every message with tensors
        """
        for header in headers:
            if header.device or header.block is not None:
                return self._decode(headers, payload, source)
        return decode_tensors(headers, payload, self._limits)

    def decode_gradients(
        self,
        headers: Sequence[TensorHeader],
        payload: memoryview | None,
        source: WorkerId,
        homes: Sequence[torch.device],
    ) -> list[Tensor]:
        """Decode gradients: each arrives on the device that its tensor came from."""
        home_names = ["" if home.type == CPU else str(home) for home in homes]
        if len(headers) != len(home_names):
            raise BadMessage("gradients came for another number of tensors than left")
        at_home = [
            header if header.device == META else replace(header, device=home)
            for header, home in zip(headers, home_names, strict=True)
        ]
        return self.decode(at_home, payload, source)

    def _decode(
        self, headers: Sequence[TensorHeader], payload: memoryview | None, source: WorkerId
    ) -> list[Tensor]:
        arriving = _Arriving(self._incoming_of(source).taking(), self._drivers)
        try:
            return decode_tensors(headers, payload, self._limits, arriving)
        except DeviceError as error:
            raise GradwireError(f"a tensor could not be copied on arrival: {error}") from error
        finally:
            arriving.taking.close()

    def _incoming_of(self, source: WorkerId) -> IncomingLane:
        lane = self._incoming.get(source)
        if lane is None:
            with self._lock:
                lane = self._incoming.setdefault(source, IncomingLane(self._lock))
        return lane

    def drop(self, headers: Sequence[TensorHeader], source: WorkerId) -> None:
        """A message is dropped unread: its blocks may be used again."""
        numbers = {header.block[0] for header in headers if header.block is not None}
        if numbers:
            self._incoming_of(source).give_back(numbers)

    def _serve_open(self, message: OpenBlock, _: Payload, source: Source) -> None:
        lane = self._incoming_of(source.worker)
        driver = self._drivers(message.kind)
        try:
            if isinstance(driver, str):
                raise DeviceError(f"on the peer, {driver}")
            opened = lane.open(message, driver)
        except (DeviceError, OSError) as error:
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
            lanes = [*self._incoming.values(), *self._outgoing.values()]
            self._incoming, self._outgoing = {}, {}
        for lane in lanes:
            lane.close()


def _takes_lane(tensor: Tensor, name: str) -> bool:
    """Whether a device lane can carry a tensor to a device of this name."""
    if tensor.is_cpu or tensor.is_meta or not name:
        return False
    return tensor.layout is torch.strided and tensor.numel() > 0


@cache
def uuid_of(driver: DeviceDriver, device: torch.device) -> str:
    """The name of a device, which never changes; to ask for it takes microseconds."""
    return driver.uuid_of(device)


@final
class _Arriving:
    """The devices of one message that is decoded."""

    def __init__(self, taking: Taking, drivers: Drivers) -> None:
        self.taking, self._drivers = taking, drivers

    def take(self, header: TensorHeader, numel: int, dtype: torch.dtype) -> Tensor:
        """The elements of a tensor that lies in a block."""
        assert header.block is not None
        return self.taking.take(header.block, numel, dtype, self._device(header.device))

    def place(self, tensor: Tensor, name: str) -> Tensor:
        """A copy on the device of this name of a tensor that came in host memory."""
        try:
            return tensor.to(self._device(name))
        except RuntimeError as error:
            raise BadMessage(f"a tensor could not be placed on {name}: {error}") from error

    def _device(self, name: str) -> torch.device:
        if not name:
            return torch.device(CPU)
        device, uuid = split_name(name)
        kind = device.partition(":")[0]
        if uuid:
            driver = self._drivers(kind)
            found = None if isinstance(driver, str) else driver.device_with(uuid)
            if found is not None:
                return found
        elif device in _own_devices():
            return torch.device(device)
        where = f"the sender's {device} ({uuid})" if uuid else device
        raise BadMessage(
            f"a tensor of {where} arrived, but this worker does not see that device",
            hint="say by Options(device_maps=…) or device_map= on which device it should arrive, "
            "or send tensor.cpu()",
        )


def _own_devices() -> list[str]:
    kind = torch.accelerator.current_accelerator()
    count = 0 if kind is None else torch.accelerator.device_count()
    return [f"{kind}:{index}" for index in range(count)]
