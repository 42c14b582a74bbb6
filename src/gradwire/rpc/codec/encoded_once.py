"""EncodedOnce: the arguments of one call to several workers, which are encoded once.

What a receiver has for itself is made for each: the edges of the graph, and a fork of each
reference. With references, or on devices, the arguments are encoded for each receiver.
"""

from __future__ import annotations

from typing import final

from gradwire.agent.devices.maps import DeviceMap
from gradwire.ids import ContextId, WorkerId
from gradwire.rpc.codec.body import BodyCodec, EncodedBody
from gradwire.rpc.codec.walk import Place
from gradwire.wire.tensor import arrive_on_cpu


@final
class EncodedOnce:
    """Takes the place of `BodyCodec.encode` in the calls of one function on several workers.

    It holds views of the tensors: the calls must leave before these change.
    """

    def __init__(self) -> None:
        self._first: EncodedBody | None = None

    def __call__(
        self,
        bodies: BodyCodec,
        value: object,
        to: WorkerId,
        context: ContextId | None,
        place: Place,
        deadline: float,
        device_map: DeviceMap | None = None,
    ) -> EncodedBody:
        """See `BodyCodec.encode`."""
        if self._first is not None:
            return bodies.again(self._first, to, context)
        encoded = bodies.encode(value, to, context, place, deadline, device_map)
        if device_map is None and is_for_all(encoded):
            self._first = encoded
        return encoded


def is_for_all(encoded: EncodedBody) -> bool:
    """Whether nothing of it was made for its receiver alone but its edges."""
    return not encoded.body.references and arrive_on_cpu(encoded.body.tensors)
