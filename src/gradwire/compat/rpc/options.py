"""The options that `init_rpc` takes, in the classes of torch.distributed.rpc."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real

import torch

from gradwire.compat.rpc import constants
from gradwire.options import FOREVER, Options, Timeouts, is_insecure_by_environment

DeviceType = int | str | torch.device
DeviceMap = dict[torch.device, torch.device]

__all__ = ["TensorPipeRpcBackendOptions"]


class RpcBackendOptions:
    """What every backend needs to know."""

    def __init__(
        self,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
    ) -> None:
        self._check("rpc_timeout", rpc_timeout, Real)
        self._check("init_method", init_method, str)
        self.rpc_timeout = float(rpc_timeout)
        self.init_method = init_method

    def _check(self, name: str, value: object, wanted: type) -> None:
        if not isinstance(value, wanted):
            raise TypeError(
                f"{type(self).__name__}: incompatible constructor arguments: "
                f"{name}={value!r} is no {wanted.__name__}"
            )


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """The options of the TENSORPIPE backend. `_transports` and `_channels` have no effect here."""

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[DeviceType, DeviceType]] | None = None,
        devices: Sequence[DeviceType] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self._check("num_worker_threads", num_worker_threads, Integral)
        self.num_worker_threads = int(num_worker_threads)
        self.device_maps: dict[str, DeviceMap] = {
            to: _device_map(given) for to, given in (device_maps or {}).items()
        }
        self.devices: list[torch.device] = []
        self.set_devices(devices or [])
        self._transports, self._channels = _transports, _channels

    def set_device_map(self, to: str, device_map: Mapping[DeviceType, DeviceType]) -> None:
        """Add on which device of a callee the tensors of each device here arrive."""
        known = self.device_maps.get(to, {})
        more = _device_map(device_map)
        for ours, theirs in more.items():
            if known.get(ours, theirs) != theirs:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping: {ours} of this worker is "
                    f"mapped to {known[ours]} of {to} already, and now to {theirs}"
                )
        self.device_maps[to] = {**known, **more}

    def set_devices(self, devices: Sequence[DeviceType]) -> None:
        """Say which devices of this worker calls may use."""
        named = [_device(device) for device in devices]
        for device in named:
            if device.type != "cuda":
                raise ValueError(
                    "`set_devices` expect a list of CUDA devices, but got "
                    f"device type {device.type}."
                )
        self.devices = named

    def for_worker(self) -> Options:
        """The same as gradwire's own options; the deadline for joining is the default."""
        seconds = float(self.rpc_timeout) or FOREVER
        return Options(
            init_method=self.init_method,
            timeouts=Timeouts(call=seconds),
            insecure=is_insecure_by_environment(),
            threads=max(1, self.num_worker_threads),
            device_maps=self.device_maps,
        )


def _device(given: DeviceType) -> torch.device:
    """A number is that of a CUDA device, even on a machine that has none."""
    return torch.device("cuda", given) if isinstance(given, int) else torch.device(given)


def _device_map(given: Mapping[DeviceType, DeviceType]) -> DeviceMap:
    found: DeviceMap = {}
    for ours, theirs in given.items():
        other = _device(theirs)
        if other in found.values():
            raise ValueError(
                f"`device_map` only supports 1-to-1 mapping: two devices are mapped to {other}"
            )
        found[_device(ours)] = other
    return found
