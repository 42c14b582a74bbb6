"""The events of a profile as they travel, and the clock that the caller shows them on; pure.

They are data of a peer: names, times, shapes and sizes, all of them checked, and no values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec.structs import replace

from gradwire.errors import BadMessage

MOST_EVENTS = 1 << 16
"""of one call"""
LONGEST_NAME = 1 << 10
_REMOTE = "#remote_op: "  # torch's
_BREAKS_A_TRACE = str.maketrans({'"': "'", "\\": "/", **dict.fromkeys(map(chr, range(32)), " ")})
"""torch writes names into the JSON of a trace as they are"""

_Int = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
_Nanoseconds = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Shape = Annotated[list[_Int], msgspec.Meta(max_length=64)]


class RemoteEvent(msgspec.Struct, frozen=True, array_like=True):
    """One range of a profile, on the clock of the worker that tells of it."""

    name: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
    node: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    thread: _Int
    start: _Nanoseconds
    end: _Nanoseconds
    is_async: bool = False
    shapes: Annotated[list[_Shape], msgspec.Meta(max_length=1 << 10)] = []
    scope: _Int = 0
    sequence: _Int = -1
    forward_thread: _Int = 0
    memory: _Int = 0
    device_memory: _Int = 0
    flops: _Int = 0


_List = Annotated[list[RemoteEvent], msgspec.Meta(max_length=MOST_EVENTS + 1)]
_decoder = msgspec.msgpack.Decoder(_List)


def pack_events(events: Sequence[RemoteEvent]) -> bytes:
    """The events as bytes; of too many the first ones, and one that says so."""
    kept = list(events[:MOST_EVENTS])
    if len(events) > len(kept):
        more = f"{len(events) - len(kept)} more events were left out"
        kept.append(replace(kept[-1], name=more, start=kept[-1].end))
    return msgspec.msgpack.encode(kept)


def unpack_events(data: object) -> list[RemoteEvent]:
    """The events that a peer sent."""
    try:
        events = _decoder.decode(data)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise BadMessage(f"the events of a profile are not as agreed: {error}") from None
    if any(event.end < event.start for event in events):
        raise BadMessage("an event of a profile ends before it begins")
    return events


def named_after(call: str, event: RemoteEvent) -> RemoteEvent:
    """An event of the function that a call ran, under torch's name for it."""
    name = f"{call}{_REMOTE}{event.name}".translate(_BREAKS_A_TRACE)
    return replace(event, name=name[:LONGEST_NAME])


class CallBounds(NamedTuple):
    """Between which times a call was under way here, and its function there."""

    began: int
    ended: int
    first: int
    last: int


def ahead(calls: Iterable[CallBounds]) -> int | None:
    """What to add to the times of a worker: nothing runs before its call, or after its answer.

    Where one clock fits, such as that of two processes on one machine, it is left as it is. None if
    no offset fits all of the calls.
    """
    calls = list(calls)
    least = max(call.began - call.first for call in calls)
    most = min(call.ended - call.last for call in calls)
    if least > most:
        return None
    return 0 if least <= 0 <= most else (least + most) // 2


def moved(event: RemoteEvent, offset: int) -> RemoteEvent:
    """The event on the clock of the caller."""
    return replace(event, start=max(0, event.start + offset), end=max(0, event.end + offset))
