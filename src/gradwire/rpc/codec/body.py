"""BodyCodec: encodes the arguments or the result of a call as a message body for one peer.

Encoding makes four things, or none: data from the value, a payload from its tensors, a counted copy
(a *fork*) of each reference, and an edge for each tensor that requires a gradient. If one of them
fails, no fork, no edge and no pinned tensor is left behind.

Common values take a *fast path*: scalars and tensors, alone or in a tuple. It makes the same
*skeletons* as walk.py: the value, with a number in the place of each tensor. Everything else is
left to the codec, which walks into containers and raises errors about what a peer sent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final, final

import msgspec
from msgspec.structs import replace
from torch import Tensor
from torch.nn import Parameter

from gradwire.agent.devices.maps import DeviceMap
from gradwire.agent.devices.own import Handoff
from gradwire.autograd.engine import Engine
from gradwire.autograd.messages import Crossing
from gradwire.errors import NotSerializable
from gradwire.ids import ContextId, WorkerId
from gradwire.rpc.behavior import Behavior
from gradwire.rpc.codec.codec import Codec, from_msgpack, malformed, to_msgpack
from gradwire.rpc.codec.pickle_codec import PickleCodec
from gradwire.rpc.codec.walk import AS_THEY_ARE, LEAVES, Node, Place, Tag
from gradwire.rpc.messages import Body, Reference
from gradwire.rpc.refs.message_refs import MessageRefs
from gradwire.rpc.refs.refs import Refs
from gradwire.torch_private import has_tangent, is_inside_transform, wrapped_by_transform
from gradwire.wire.message import Buffer
from gradwire.wire.tensor import (
    REQUIRES_GRAD,
    TensorHeader,
    are_on_cpu,
    arrive_on_cpu,
    decode_tensors,
    encode_tensors,
    without_inference,
)

DICT, TENSOR, TUPLE = Tag.DICT, Tag.TENSOR, Tag.TUPLE
_FAST_DEPTH: Final = 2
"""the nesting of the fast path: the arguments of a call are a tuple inside of its tuple"""
WALK: Final = object()
"""returned by the fast path in place of a value that needs a walk"""
_depth_of, _flags_of, _tensors_of = map(attrgetter, ("depth", "flags", "tensors"))
_NUMBER = re.compile(r"tensors\[(\d+)\]")
_ROWS = [[[TENSOR, n] for n in range(count)] for count in range(4)]
_CALLS: Final = [to_msgpack([TUPLE, [TUPLE, *row], [DICT]]) for row in _ROWS]
"""at n, the data of a call whose arguments are n tensors and nothing else"""
_RESULTS: Final = [to_msgpack(None), to_msgpack([TENSOR, 0])]
"""the data of None and of one tensor"""


class EncodedBody(msgspec.Struct, frozen=True):
    """A body that must be sent before its tensors change: `payload` holds views of their memory."""

    body: Body
    payload: Sequence[Buffer]
    copies: int = 0
    tensors: Sequence[Tensor] = ()
    """those of the value, from which the edges begin"""


class DecodedBody(msgspec.Struct, frozen=True):
    """A value that arrived.

    `depth` is that of the deepest edge it came by. `cut` counts the tensors that lost their graph,
    and `copies` those that lost it inside an object.
    """

    value: Any
    depth: int = 0
    cut: int = 0
    copies: int = 0
    handoff: Handoff | None = None
    """of a value on a device: another thread calls this before it uses the value"""
    source: WorkerId | None = None
    """the worker that sent it, if `cut` or `copies` is not 0"""


class Taken:
    """Marks a body that `BodyCodec.decode` has begun to decode: what it holds is not lost now."""

    is_taken = False


_UNSHARED = Taken()


@final
class BodyCodec:
    """Encodes and decodes the message bodies of one worker."""

    def __init__(
        self, codec: Codec | PickleCodec, engine: Engine, refs: Refs, behavior: Behavior
    ) -> None:
        self._codec, self._engine, self._refs = codec, engine, refs
        self._events = engine.events
        self._riding_to = engine.releases.riding_to
        self._devices = engine.devices
        self._leaves = behavior.leaves_outside_contexts
        self._carries_modes = behavior.carries_modes
        limits = self._limits = engine.limits
        self._fast_bytes = -1
        """how long the data of the fast path may be; longer data goes to the codec"""
        if isinstance(codec, Codec) and limits.depth >= _FAST_DEPTH:
            self._fast_bytes = min(limits.elements, limits.head)
        self._calls, self._results = map(self._by_types, (_CALLS, _RESULTS))

    def _by_types(self, known: list[bytes]) -> dict[tuple[type, ...], bytes]:
        """The known data by the types of its tensors, but for what the fast path may not use."""
        return {
            (Tensor,) * n: each for n, each in enumerate(known) if len(each) <= self._fast_bytes
        }

    def encode(
        self,
        value: object,
        to: WorkerId,
        context: ContextId | None,
        place: Place,
        deadline: float,
        device_map: DeviceMap | None = None,
    ) -> EncodedBody:
        """Encode a value for `to`; NotSerializable says where in it the refused part is."""
        tensors: Any  # may hold anything: only the types of tensors are found below
        if place == "result":
            tensors, named, known = () if value is None else (value,), None, self._results
        else:
            (tensors, named), known = value, self._calls  # type: ignore[misc]
        data = None if named else known.get((*map(type, tensors),))
        if data is not None and len(tensors) > 1 and _has_one_twice(tensors):
            data = None
        try:
            if data is None and self._fast_bytes >= 0:
                node = maybe_node(value, tensors := [])
                if node is not WALK and len(packed := to_msgpack(node)) <= self._fast_bytes:
                    data = packed
            if data is not None:
                if not tensors:
                    return EncodedBody(Body(data, [], [], [], self._riding_to(to)), ())
                return self._with_tensors(
                    data, tensors, [], to, context, place, deadline, device_map
                )
            return self._walked(value, to, context, place, deadline, device_map)
        except NotSerializable as refusal:
            raise self._placed(refusal, value, place) from refusal.__cause__

    def again(self, first: EncodedBody, to: WorkerId, context: ContextId | None) -> EncodedBody:
        """The arguments of a call once more for another worker, with edges of their own.

        See codec/encoded_once.py.
        """
        body, crossings = first.body, list[Crossing]()
        try:
            if any(map(_flags_of, body.tensors)):
                crossings = self._engine.attach_send(context, to, first.tensors, is_call=True)
            body = replace(body, crossings=crossings, released=self._riding_to(to))
            return replace(first, body=body)
        except BaseException:
            self._engine.withdraw(crossings)
            raise

    def _walked(
        self,
        value: object,
        to: WorkerId,
        context: ContextId | None,
        place: Place,
        deadline: float,
        device_map: DeviceMap | None,
    ) -> EncodedBody:
        """As `encode`, of what may hold anything."""
        encoded, packing = None, MessageRefs(self._refs.local, [], to, deadline)
        try:
            with packing as references:
                data, tensors, copies = self._codec.encode(value, place)
                about = (to, context, place, deadline, device_map)
                encoded = self._with_tensors(data, tensors, references, *about)
            # With torch's API nobody expects a gradient outside of a context.
            is_told = copies and (context is not None or not self._leaves)
            return replace(encoded, copies=copies) if is_told else encoded
        except BaseException:
            self._refs.pack_undone(packing.refs)
            if encoded is not None:
                self._release(encoded.body.tensors, encoded.body.crossings, to)
            raise

    def _with_tensors(
        self,
        data: bytes,
        tensors: Sequence[Tensor],
        references: list[Reference],
        to: WorkerId,
        context: ContextId | None,
        place: Place,
        deadline: float,
        device_map: DeviceMap | None,
    ) -> EncodedBody:
        if not tensors:
            return EncodedBody(Body(data, [], [], references, self._riding_to(to)), ())
        _check_not_transformed(tensors)
        began = 0.0 if (record := self._events.record) is None else self._events.now()
        is_call = place != "result"  # for a result there is no line of the user's program
        if device_map is None and are_on_cpu(tensors):
            headers, payload = encode_tensors(tensors, self._limits)
        else:
            headers, payload = self._devices.encode(tensors, to, deadline, device_map, is_call)
        crossings: list[Crossing] = []
        try:
            if not self._carries_modes:  # autograd refuses what was made in inference mode
                headers = [without_inference(header) for header in headers]
            if any(map(_flags_of, headers)):  # otherwise none requires grad
                crossings = self._engine.attach_send(context, to, tensors, is_call=is_call)
            body = Body(data, headers, crossings, references, self._riding_to(to))
            if record is not None:
                record("encode", began, "", to, headers, sum(map(len, payload)))
            return EncodedBody(body, payload, 0, tensors)
        except BaseException:
            self._release(headers, crossings, to)
            raise

    def _placed(self, refusal: NotSerializable, value: object, place: Place) -> NotSerializable:
        """The refusal of a tensor, with its place in the value instead of its index, if known."""
        number, codec = _NUMBER.fullmatch(refusal.place), self._codec
        if number is None or not isinstance(codec, Codec):
            return refusal
        at = codec.place_of_tensor(value, place, int(number[1])) or refusal.place
        return NotSerializable(refusal.message, place=at, hint=refusal.hint)

    def undo(self, encoded: EncodedBody, to: WorkerId) -> None:
        """Release what a body holds that was not sent."""
        self._release(encoded.body.tensors, encoded.body.crossings, to)
        self._refs.pack_undone(encoded.body.references)

    def _release(
        self, headers: Sequence[TensorHeader], crossings: Sequence[Crossing], to: WorkerId
    ) -> None:
        if not arrive_on_cpu(headers):
            self._devices.withdraw(headers, to)
        if crossings:
            self._engine.withdraw(crossings)

    def decode(
        self,
        body: Body,
        payload: memoryview | None,
        *,
        source: WorkerId,
        context: ContextId | None,
        is_answered: bool = False,
        is_recorded: bool = True,
        is_handed_over: bool = False,
        taken: Taken = _UNSHARED,
    ) -> DecodedBody:
        """The value, with its references held and, if `is_recorded`, its graph attached.

        With `is_handed_over`, another thread may use it. `taken`: who else would release the body.

        For `is_answered` see Note [An answer accepts], refs/exchange.py.
        """
        crossings: Sequence[Crossing] = body.crossings
        try:
            refs, headers = body.references, body.tensors
            # Held here: references that the value does not use end with this function.
            came = self._refs.unpacking(refs, source, is_answered=is_answered) if refs else None
            taken.is_taken = True  # from here on they are held, and edges are dropped below
            if not headers:
                return DecodedBody(self._decode_value(body.data, (), came))
            on_cpu = arrive_on_cpu(headers)
            tensors = self._tensors(headers, payload, source, on_cpu=on_cpu)
            if crossings and not is_recorded:
                self._engine.drop_crossings(crossings, source)
                crossings = ()
            elif crossings and not self._engine.attach_recv(context, source, crossings, tensors):
                crossings = ()
        except BaseException:
            if crossings:
                self._engine.drop_crossings(crossings, source)
            raise
        if on_cpu and not crossings and not any(map(_flags_of, headers)):
            return DecodedBody(self._decode_value(body.data, tensors, came))
        cut, depth = cut_tensors(headers, crossings), max(map(_depth_of, crossings), default=0)
        for n in cut if self._leaves else ():
            tensors[n].requires_grad_()
        handoff = None if on_cpu or not is_handed_over else self._devices.handoff(tensors)
        value = self._decode_value(body.data, tensors, came)
        return DecodedBody(value, depth, len(cut), 0, handoff, source if cut else None)

    def _tensors(
        self,
        headers: list[TensorHeader],
        payload: memoryview | None,
        source: WorkerId,
        *,
        on_cpu: bool,
    ) -> list[Tensor]:
        began = 0.0 if (record := self._events.record) is None else self._events.now()
        if on_cpu:
            tensors = decode_tensors(headers, payload, self._limits)
        else:
            tensors = self._devices.decode(headers, payload, source)
        if record is not None:
            record("decode", began, "", source, headers, len(payload or ()))
        return tensors

    def _decode_value(
        self, data: bytes, tensors: Sequence[Tensor], came: MessageRefs | None
    ) -> object:
        if len(data) > self._fast_bytes:
            decode = partial(self._codec.decode, data, tensors)
        else:
            count = len(tensors)
            if count < len(_CALLS) and data == _CALLS[count]:
                return (*tensors,), {}
            if count < len(_RESULTS) and data == _RESULTS[count]:
                return tensors[0] if count else None
            try:
                node = from_msgpack(data)
            except Exception as error:
                raise malformed(error) from error
            value = maybe_value(node, tensors)
            if value is not WALK:
                return value
            assert isinstance(self._codec, Codec)  # or _fast_bytes were -1
            decode = partial(self._codec.decode_node, node, tensors)
        with came or self._refs.unpacking((), -1):  # empty: hides those of an outer message
            return decode()


def _check_not_transformed(tensors: Sequence[Tensor]) -> None:
    """NotSerializable for wrappers of torch.func and for tangents. hot: each message with tensors

    The memory of a wrapper does not hold its values: a functionalized one's is garbage.
    """
    if is_inside_transform() and (wrapped := wrapped_by_transform(tensors)) is not None:
        raise NotSerializable(
            "a tensor inside a torch.func transform (vmap, grad, …) cannot be serialized",
            place=f"tensors[{wrapped}]",
            hint="use the transform inside the function that is called, not around the call",
        )
    if has_tangent(tensors):
        raise NotSerializable(
            "a tensor with a forward-mode tangent, which does not cross workers",
            hint="differentiate in reverse, or leave dual_level() before the call",
        )


def cut_tensors(headers: Sequence[TensorHeader], crossings: Sequence[Crossing]) -> list[int]:
    """The indices of tensors that require grad and that no edge records. hot: each message"""
    if len(headers) == len(crossings) == 1 or not any(map(_flags_of, headers)):
        return []  # the edge has a tensor, the only one
    cut = {n for n, header in enumerate(headers) if header.flags & REQUIRES_GRAD}
    return sorted(cut.difference(*map(_tensors_of, crossings)))


def maybe_node(value: object, tensors: list[Tensor]) -> object:
    """The skeleton of a value, or WALK; appends to `tensors`. hot: all arguments and results"""
    is_call = False
    if type(value) is not tuple:
        values: tuple[object, ...] = (value,)
    elif len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict and not value[1]:
        is_call, values = True, value[0]  # a call's arguments, without keywords
    else:
        values = value
    row: Node = [TUPLE]
    for one in values:
        kind = type(one)
        if kind in AS_THEY_ARE:
            row.append(one)
        elif kind is Tensor or kind is Parameter:
            row.append([TENSOR, len(tensors)])
            tensors.append(one)  # type: ignore[arg-type]
        elif (
            kind is int and -(1 << 63) <= one < 1 << 64  # type: ignore[operator]
        ) or (
            kind is str and one.isascii()  # type: ignore[attr-defined]
        ):
            row.append(one)
        else:
            return WALK
    if len(tensors) > 1 and _has_one_twice(tensors):
        return WALK
    if is_call:
        return [TUPLE, row, [DICT]]
    return row if values is value else row[1]


def _has_one_twice(tensors: Sequence[Tensor]) -> bool:
    return len({*map(id, tensors)}) != len(tensors)


def maybe_value(node: object, tensors: Sequence[Tensor]) -> object:
    """The value of a skeleton that uses all tensors, or WALK. hot: all arguments and results"""
    is_tuple = type(node) is list and node and type(node[0]) is int and node[0] == TUPLE
    row: Any = node if is_tuple else (TUPLE, node)
    is_call = is_tuple and len(row) == 3 and type(row[2]) is list and len(row[2]) == 1
    if is_call:
        _, row, (tag,) = row
        if type(row) is not list or not row or type(row[0]) is not int or row[0] != TUPLE:
            return WALK
        if type(tag) is not int or tag != DICT:
            return WALK
    values: list[object] = []
    used = 0
    for one in row[1:]:
        if type(one) in LEAVES:
            values.append(one)
        elif type(one) is list and len(one) == 2 and type(one[0]) is int and one[0] == TENSOR:
            if one[1] != used or used == len(tensors):
                return WALK
            values.append(tensors[used])
            used += 1
        else:
            return WALK
    if used != len(tensors):
        return WALK
    if is_call:
        return tuple(values), {}
    return tuple(values) if is_tuple else values[0]
