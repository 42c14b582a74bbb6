"""A message as a frame, if it may travel."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.errors import NotSerializable
from gradwire.options import Limits
from gradwire.wire.frame import Buffer, Frame
from gradwire.wire.message import Message, encode


def framed(
    message: Message, payload: Sequence[Buffer], limits: Limits, request: int = 0, flags: int = 0
) -> Frame:
    """What is over the limits is refused here: its receiver would give up the connection."""
    head, body = encode(message), sum(map(len, payload)) if payload else 0
    if len(head) > limits.head or body > limits.payload:
        raise NotSerializable(
            f"a {type(message).__name__} of {len(head)} bytes and {body} bytes of tensors is "
            f"over the limits of {limits.head} and {limits.payload}",
            hint="send it in parts, or raise Options(limits=Limits(…)) on both workers",
        )
    kind: int = type(message).__struct_config__.tag  # type: ignore[assignment]  # as `kind_of` says
    return Frame(kind, flags, request, head, payload)
