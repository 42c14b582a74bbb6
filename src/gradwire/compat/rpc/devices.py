"""Which devices each worker uses for calls, and whether their maps fit together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from gradwire.agent.peers.directory import Directory
from gradwire.compat.rpc.options import DeviceMap, TensorPipeRpcBackendOptions


class _Said(msgspec.Struct):
    name: str
    count: int
    maps: dict[str, dict[str, str]]
    devices: list[str]


@dataclass(frozen=True)
class DeviceFacts:
    """What one worker says of its devices."""

    name: str
    count: int
    maps: dict[str, DeviceMap]
    devices: list[torch.device]

    @classmethod
    def of(cls, name: str, options: TensorPipeRpcBackendOptions) -> DeviceFacts:
        """What we say."""
        count = torch.cuda.device_count()
        return cls(name, count, options.device_maps, options.devices)

    def has(self, devices: Iterable[torch.device]) -> bool:
        """Whether these exist there."""
        return all(
            d.type == "cpu" or (d.type == "cuda" and 0 <= (d.index or 0) < self.count)
            for d in devices
        )

    def to_note(self) -> str:
        """As others find it in their directory."""
        maps = {to: {str(a): str(b) for a, b in m.items()} for to, m in self.maps.items()}
        said = _Said(self.name, self.count, maps, [str(device) for device in self.devices])
        return msgspec.json.encode(said).decode()

    @classmethod
    def from_note(cls, note: str) -> DeviceFacts:
        """What another has said."""
        said = msgspec.json.decode(note, type=_Said)
        maps = {
            to: {torch.device(a): torch.device(b) for a, b in m.items()}
            for to, m in said.maps.items()
        }
        return cls(said.name, said.count, maps, [torch.device(device) for device in said.devices])


def agree_on_devices(mine: DeviceFacts, directory: Directory) -> list[torch.device]:
    """Our devices, if what everyone has said of theirs fits together."""
    notes = [directory.note(info.id) for info in directory.others()]
    everyone = [mine, *(DeviceFacts.from_note(note) for note in notes if note)]
    check_device_maps(everyone, is_static_group=not directory.is_open)
    return mine.devices or _used(mine, everyone)


def _used(mine: DeviceFacts, everyone: Sequence[DeviceFacts]) -> list[torch.device]:
    ours = {device for device_map in mine.maps.values() for device in device_map}
    asked = {device for other in everyone for device in other.maps.get(mine.name, {}).values()}
    return sorted((ours | asked) - {torch.device("cpu")}, key=lambda device: device.index or 0)


def check_device_maps(everyone: Sequence[DeviceFacts], *, is_static_group: bool = True) -> None:
    """ValueError if a worker names devices or workers that there are not, or one of them twice."""
    by_name = {facts.name: facts for facts in everyone}
    for facts in everyone:
        if len(set(facts.devices)) != len(facts.devices):
            raise _wrong(facts, "duplicated devices", facts.devices)
        if not facts.has(facts.devices):
            raise _wrong(facts, "devices with invalid indices", facts.devices)
        if is_static_group and not facts.maps.keys() <= by_name.keys():
            raise _wrong(facts, "invalid target node names in its device maps", list(facts.maps))
        for to, device_map in facts.maps.items():
            _check_map(facts, to, device_map, by_name.get(to))


def _check_map(facts: DeviceFacts, to: str, given: DeviceMap, target: DeviceFacts | None) -> None:
    if len(set(given.values())) != len(given):
        raise _wrong(facts, f"duplicated target devices in its device map for {to}", given)
    _check_side(facts, f"source devices{{}} in its device map for {to}", list(given), facts)
    if target is not None:
        theirs = list(given.values())
        _check_side(facts, f"target devices{{}} in its device map for {to}", theirs, target)


def _check_side(
    facts: DeviceFacts, what: str, devices: list[torch.device], owner: DeviceFacts
) -> None:
    if owner.devices and not set(devices) <= set(owner.devices):
        raise _wrong(facts, "unexpected " + what.format(""), devices)
    if not owner.devices and not owner.has(devices):
        raise _wrong(facts, what.format(" with invalid indices"), devices)


def _wrong(facts: DeviceFacts, what: str, given: object) -> ValueError:
    return ValueError(f"Node {facts.name} has {what}\nit said {given}, of {facts.count} devices")
