"""On which devices of this worker the tensors of a message arrive, by the names that it gives them.

See maps.py for the names.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from gradwire.agent.devices.lanes import Taking
from gradwire.agent.devices.maps import CPU, split_name
from gradwire.agent.devices.own import Drivers
from gradwire.errors import BadMessage
from gradwire.transport.devices.cuda import cuda_device_with
from gradwire.wire.tensor import Layout, TensorHeader

_MOST_NAMES = 256
"""that peers have given to devices of this worker: a peer may use a new one each time"""


@final
class Arrivals:
    """The devices of one message that is decoded."""

    def __init__(self, taking: Taking, drivers: Drivers, known: dict[str, torch.device]) -> None:
        self._taking, self._drivers, self._known = taking, drivers, known

    def take(self, header: TensorHeader, layout: Layout) -> Tensor:
        """A tensor that lies in a block."""
        assert header.block is not None
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
