"""DeviceLinks: encodes and decodes the tensors of every message, wherever their bytes are.

Tensors on the CPU are views of the payload (wire/tensor.py). A tensor on another device takes its
device lane to the peer if there is one, so that its bytes never leave the device (lanes.py). Else
it is copied to host memory and sent there. On which streams, says own.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import final

import torch
from msgspec.structs import replace
from torch import Tensor

from gradwire.agent.agent import Agent
from gradwire.agent.devices.arrivals import Arrivals
from gradwire.agent.devices.lanes import (
    IncomingLane,
    Lease,
    OutgoingLane,
    Taking,
    aligned,
    is_inside,
)
from gradwire.agent.devices.maps import CPU, DeviceMap, no_map
from gradwire.agent.devices.own import Drivers, Home, OwnDevices, drivers_of_this_process
from gradwire.agent.messages import BlockOpened, OpenBlock
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.current import current_inbound
from gradwire.errors import BadMessage, GradwireError, PeerLost
from gradwire.ids import WorkerId
from gradwire.transport.devices.contract import DeviceDriver, DeviceError
from gradwire.transport.devices.words import UNREAD
from gradwire.wire.block_tensor import maybe_plain, maybe_plain_layout
from gradwire.wire.message import Buffer
from gradwire.wire.tensor import (
    META,
    Placement,
    TensorHeader,
    decode_tensors,
    encode_tensors,
)

Encoded = tuple[list[TensorHeader], list[Buffer]]


@final
class DeviceLinks:
    """The tensors of one worker's messages."""

    def __init__(
        self, agent: Agent, drivers: Drivers = drivers_of_this_process, *, needs_map: bool = False
    ) -> None:
        self._agent, self._limits = agent, agent.limits
        own = self._own = OwnDevices(drivers)
        self.homes_of, self.handoff = own.homes_of, own.handoff
        self.join_default_streams = own.join_default_streams
        self._needs_map = needs_map
        self._lock = agent.directory.lock
        self._outgoing: dict[WorkerId, OutgoingLane] = {}
        self._incoming: dict[WorkerId, IncomingLane] = {}
        self._ended: dict[WorkerId, tuple[int, int]] = {}
        """the bytes that lanes have carried which are over"""
        self._known_names: dict[str, torch.device] = {}
        """those of devices that peers have named in messages"""
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            agent.dispatch.run_guests_inside(partial(own.default_streams, accelerator.type))
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
        is_call: bool | None = None,
    ) -> Encoded:
        """Encode the tensors of a message to this peer.

        `is_call` is None for gradients: their receiver knows on which devices they arrive.
        """
        maps = device_map or {}
        if (headers := self._maybe_encode_plain(tensors, to, deadline, maps, is_call)) is not None:
            return headers, []
        placements = [self._placed(tensor, to, maps, is_call) for tensor in tensors]
        lanes = list(map(_maybe_lane, tensors, placements))
        sizes: dict[torch.device, int] = {}
        for tensor, lane in zip(tensors, lanes, strict=True):
            if lane is not None:
                sizes[lane] = sizes.get(lane, 0) + aligned(tensor.numel() * tensor.itemsize)
        leases: dict[torch.device | None, Lease] = {}
        try:
            for device, size in sizes.items():
                lease = self._maybe_lease(self._own[device].driver, device, size, to, deadline)
                if lease is not None:
                    leases[device] = lease
            carried = zip(placements, lanes, strict=True)
            placements = [place._replace(lease=leases.get(lane)) for place, lane in carried]
            encoded = encode_tensors(tensors, self._limits, placements)
            for lease in leases.values():
                lease.close()
        except BaseException as error:
            self._undo_leases(leases.values(), to, error)
            raise
        return encoded

    def _maybe_encode_plain(
        self,
        tensors: Sequence[Tensor],
        to: WorkerId,
        deadline: float,
        device_map: DeviceMap,
        is_call: bool | None,
    ) -> list[TensorHeader] | None:
        """The headers of plain tensors that are all on one device, in fewer steps than `encode`.

        None for others. hot: every message with tensors on devices
        """
        if not tensors or len(tensors) > self._limits.tensors:
            return None
        device = tensors[0].device
        own = self._own[device]
        name = device_map.get(own.text, "" if self._needs_map and is_call is not None else own.name)
        if not name or name == CPU:
            return None
        plain, size = [], 0
        for tensor in tensors:
            if type(tensor) not in own.types or tensor.device != device:
                return None
            facts = maybe_plain(tensor)
            if facts is None:
                return None
            plain.append(facts)
            size += aligned(facts[0].nbytes)
        lease = None
        try:
            lease = self._maybe_lease(own.driver, device, size, to, deadline)
            if lease is None:
                return None
            headers = [
                TensorHeader(code, shape, 0, flags, None, 0, name, (), lease.append(tensor))
                for tensor, code, shape, flags in plain
            ]
            lease.close()
        except BaseException as error:
            self._undo_leases([] if lease is None else [lease], to, error)
            raise
        return headers

    def _undo_leases(self, leases: Iterable[Lease], to: WorkerId, error: BaseException) -> None:
        for lease in leases:
            lease.end()
            lane = self._outgoing.get(to)
            if lane is not None:  # else the peer was lost meanwhile
                lane.give_back(lease.number)
        if isinstance(error, DeviceError):
            raise GradwireError(f"a tensor could not be copied for sending: {error}") from error

    def _placed(
        self, tensor: Tensor, to: WorkerId, device_map: DeviceMap, is_call: bool | None
    ) -> Placement:
        """On which device a tensor arrives, see maps.py; and whether a driver can copy it."""
        if tensor.is_cpu:
            mapped = device_map.get(CPU, CPU)
            return Placement("" if mapped == CPU else mapped)
        own = self._own[tensor.device]
        is_plain = type(tensor) in own.types
        if own.text in device_map:
            mapped = device_map[own.text]
            return Placement("" if mapped == CPU else mapped, None, is_plain)
        if self._needs_map and is_call is not None and not tensor.is_meta:
            raise RuntimeError(no_map(is_call, self._agent.directory.name(to), own.text))
        return Placement(own.name, None, is_plain)

    def _maybe_lease(
        self,
        driver: DeviceDriver | None,
        device: torch.device,
        size: int,
        to: WorkerId,
        deadline: float,
    ) -> Lease | None:
        if driver is None:
            return None
        driver.check_not_capturing()
        lane = self._outgoing.get(to)
        if lane is None:
            about = f"{self._agent.directory.me.name} to {self._agent.directory.name(to)}"
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
        lane = self._incoming_of(source)
        device = self._known_names.get(headers[0].device) if headers else None
        if device is not None:
            tensors = self._maybe_decode_plain(headers, lane, device)
            if tensors is not None:
                return tensors
        taking = Taking(lane, self._own.stream_of)
        arriving = Arrivals(taking, self._own.drivers, self._known_names)
        try:
            return decode_tensors(headers, payload, self._limits, arriving)
        except DeviceError as error:
            raise _not_taken(error) from error
        finally:
            taking.close(_blocks_in(headers))

    def _maybe_decode_plain(
        self, headers: Sequence[TensorHeader], lane: IncomingLane, device: torch.device
    ) -> list[Tensor] | None:
        """Plain tensors of one block, which arrive on this device, in fewer steps than `decode`.

        None for all others. hot: every message with tensors on a device
        """
        name, (number, _) = headers[0].device, headers[0].block or (0, 0)
        shared = lane.blocks.get(number)
        if shared is None or len(headers) > self._limits.tensors:
            return None
        block, plain = shared.block, []
        for header in headers:
            layout, place = maybe_plain_layout(header, self._limits), header.block
            if layout is None or place is None or place[0] != number or header.device != name:
                return None
            if not is_inside(block, place[1], layout.nbytes):
                return None
            plain.append((place[1], layout))
        try:
            return lane.take(number, plain, device, self._own.stream_of(block.device))
        except DeviceError as error:
            raise _not_taken(error) from error

    def decode_at(
        self,
        headers: Sequence[TensorHeader],
        payload: memoryview | None,
        source: WorkerId,
        homes: Sequence[Home],
    ) -> list[Tensor]:
        """Decode gradients where their tensors were; the current streams wait for them there."""
        elsewhere = [home for home in homes if self._own.stream_of(home.device) is not home.stream]
        if not elsewhere:
            return self._decode_home(headers, payload, source, homes)
        with self._own.using(elsewhere):
            tensors = self._decode_home(headers, payload, source, homes)
            join = self._own.handoff(tensors)
        if join is not None:
            join()
        return tensors

    def _decode_home(
        self,
        headers: Sequence[TensorHeader],
        payload: memoryview | None,
        source: WorkerId,
        homes: Sequence[Home],
    ) -> list[Tensor]:
        devices = {home.device for home in homes}
        if len(devices) == 1:
            tensors = self._maybe_decode_plain(headers, self._incoming_of(source), *devices)
            if tensors is not None:
                return tensors
        names = ["" if home.device.type == CPU else str(home.device) for home in homes]
        at_home = [
            header if header.device == META else replace(header, device=name)
            for header, name in zip(headers, names, strict=True)
        ]
        return self.decode(at_home, payload, source)

    def _incoming_of(self, source: WorkerId) -> IncomingLane:
        lane = self._incoming.get(source)
        if lane is None:
            about = f"{self._agent.directory.me.name} from {self._agent.directory.name(source)}"
            with self._lock:
                lane = self._incoming.setdefault(source, IncomingLane(self._lock, about))
        return lane

    def drop(self, headers: Sequence[TensorHeader], source: WorkerId) -> None:
        """A message is dropped unread: its blocks may be used again."""
        lane = self._incoming.get(source)
        if lane is not None:
            lane.give_back(_blocks_in(headers), UNREAD)

    def _serve_open(self, message: OpenBlock, _: Payload, source: Source) -> None:
        lane = self._incoming_of(source.worker)
        driver = self._own.drivers(message.kind)
        try:
            if isinstance(driver, str):
                raise DeviceError(f"on the peer, {driver}")
            opened = lane.open(message, driver)
        except (DeviceError, OSError, BadMessage) as error:
            opened = BlockOpened(b"", 0, str(error))
        self._agent.check_asker(source)  # else nobody would unmap it
        self._agent.answer(source, opened, deadline=self._agent.clock.now() + 10.0)

    def carried(self) -> dict[WorkerId, tuple[int, int]]:
        """The bytes sent and received in device memory, by peer."""
        with self._lock:
            known = [*self._ended, *self._outgoing, *self._incoming]
            return {peer: self._carried(peer) for peer in known}

    def _carried(self, peer: WorkerId) -> tuple[int, int]:
        sent, received = self._ended.get(peer, (0, 0))
        leaving, arriving = self._outgoing.get(peer), self._incoming.get(peer)
        sent += 0 if leaving is None else leaving.filled_bytes
        received += 0 if arriving is None else arriving.taken_bytes
        return sent, received

    # -- the end of a link

    def _peer_lost(self, worker: WorkerId, _: PeerLost) -> None:
        with self._lock:
            self._ended[worker] = self._carried(worker)
            lanes = [self._incoming.pop(worker, None), self._outgoing.pop(worker, None)]
        for lane in lanes:
            if lane is not None:  # on another thread, as it waits for the device
                self._agent.dispatch.service.submit_or_run(lane.close)

    def close(self) -> None:
        """This worker is closed."""
        with self._lock:
            for peer in {*self._incoming, *self._outgoing}:
                self._ended[peer] = self._carried(peer)
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


def _not_taken(error: DeviceError) -> GradwireError:
    return GradwireError(f"a tensor could not be copied on arrival: {error}")
