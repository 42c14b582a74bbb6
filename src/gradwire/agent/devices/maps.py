"""On which device of the receiver a tensor arrives. Devices are named by texts here.

In a message, a device is named "cuda:1" if a map says so: then it is that device of the receiver.
Without a map it is named "cuda:0/UUID", by the sender's index and the device's own name: the
receiver finds the same device under the index that it has there.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradwire.errors import UsageError

DeviceMap = Mapping[str, str]
CPU = "cpu"


def checked_map(given: Mapping[object, object], to: str) -> dict[str, str]:
    """A device map of the user as texts; a number is a CUDA device."""
    found = {_name_of(ours): _name_of(theirs) for ours, theirs in given.items()}
    if len(set(found.values())) < len(found):
        raise UsageError(
            f"the device map for {to} has two devices that arrive on the same one: {found}",
            hint="gradients return by the inverted map, so it must be one to one",
        )
    return found


def _name_of(device: object) -> str:
    name = f"cuda:{device}" if isinstance(device, int) else str(device)
    kind, colon, index = name.partition(":")
    if not kind.isalnum() or (colon and not index.isdecimal()):
        raise UsageError(f"{device!r} names no device", hint="write cuda:0, or cpu")
    return name if colon or name == CPU else f"{name}:0"


def inverted(device_map: DeviceMap | None) -> dict[str, str] | None:
    """The map of the way back."""
    return None if not device_map else {theirs: ours for ours, theirs in device_map.items()}


def unmapped(device: str, uuid: str) -> str:
    """The name of a device that no map mentions."""
    return f"{device}/{uuid}"


def split_name(name: str) -> tuple[str, str]:
    """The device that a message names, and its UUID or ""."""
    device, _, uuid = name.partition("/")
    return device, uuid


def no_map(is_call: bool, to: str, device: str) -> str:
    """What torch.distributed.rpc says of a device that no map mentions."""
    return (
        "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to "
        "CPU before sending them over RPC, or call `set_device_map` on "
        "`TensorPipeRpcBackendOptions` to explicitly configure device mapping. "
        f"{'Request' if is_call else 'Response'} device mapping is not available for destination "
        f"{to} for device {device} but received a tensor on that device."
    )
