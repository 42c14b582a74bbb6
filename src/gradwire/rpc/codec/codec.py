"""Codec: encodes Python values as bytes and a list of tensors, and decodes them. No pickle.

Msgpack alone would turn tuples into lists and subclasses into their bases, and refuse big integers.
So a walk (walk.py) first makes a skeleton in which every value that is not plain has a tag, and
msgpack writes that down. Decoding constructs exposed dataclasses, namedtuples and enums. It runs no
other user code but register_codec's functions and the __hash__ and __eq__ of keys.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import abc
from typing import NoReturn, final

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gradwire.errors import BadMessage, GradwireError, NotSerializable
from gradwire.options import Limits
from gradwire.rpc.codec import (
    builtin_types,
    distribution_types,
    named_types,
    numpy_types,
    standard_types,
    subclass_types,
)
from gradwire.rpc.codec.exception_values import decode_exception, encode_exception
from gradwire.rpc.codec.pickle_codec import PickleCodec
from gradwire.rpc.codec.walk import (
    END_OF_TAGS,
    FIRST_EXTENSION,
    Conversion,
    Decoder,
    Encoded,
    Encoder,
    Node,
    Place,
    Tag,
    TypeEncoder,
    exactly,
)
from gradwire.rpc.expose.names import type_name
from gradwire.rpc.expose.registry import Registry
from gradwire.wire.message import check_arrived, check_leaving

to_msgpack = msgspec.msgpack.Encoder().encode
from_msgpack = msgspec.msgpack.Decoder().decode

_PLAIN_BASES = (Tensor, np.ndarray, dict, list, tuple, set, frozenset, str, bytes, int, float)
# What cannot even be pickled: types, what errors call their values, and a hint.
_NEVER_SENT: tuple[tuple[type | tuple[type, ...], str, str], ...] = (
    (
        abc.Coroutine,
        "the coroutine of an `async def` function",
        "declare the function with def; one that answers later is decorated with "
        "@gradwire.async_execution and returns a future",
    ),
    ((abc.Generator, abc.AsyncGenerator), "a generator", "return or send a list of what it yields"),
    (
        (torch._C.Future, concurrent.futures.Future, asyncio.Future),
        "a future",
        "send what it brings, as future.wait() returns it; a function that returns a "
        "torch or gradwire future is decorated with @gradwire.async_execution",
    ),
    (
        (abc.Iterator, abc.KeysView, abc.ItemsView, abc.ValuesView),
        "a {}",
        "send a list of what it yields, list(...)",
    ),
)
_TWO_WAYS = (
    "give its class a codec with gradwire.register_codec on both workers, or allow pickles with "
    "Options(pickle=True) on both"
)
_PICKLE_HINT = "Options(pickle=True) loads them; a peer that may send one may run any code here"


@final
class Codec:
    """Encodes and decodes values on any thread; what is not data by `fallback`, if given."""

    def __init__(
        self, names: Registry, limits: Limits, fallback: PickleCodec | None = None
    ) -> None:
        self._names, self._limits, self._fallback = names, limits, fallback
        self._encoders = builtin_types.ENCODERS | numpy_types.ENCODERS | named_types.ENCODERS
        self._decoders = builtin_types.DECODERS | numpy_types.DECODERS | named_types.DECODERS
        self._decoders |= standard_types.DECODERS
        self._decoders[Tag.EXCEPTION] = decode_exception
        self._decoders[Tag.SUBCLASS] = subclass_types.decode_subclass
        self._decoders[Tag.DISTRIBUTION] = distribution_types.decode_distribution
        self._decoders[Tag.PICKLED] = self._decode_fallback
        self._extended: list[type] = []

    def extend(self, kind: type, tag: int, encode: Conversion, decode: Conversion) -> None:
        """Encode values of exactly this type as what `encode` returns.

        That must be plain: None, numbers, text, bytes, lists of these. A peer may send anything
        plain instead, so `decode` has to check it.
        """
        assert FIRST_EXTENSION <= tag < END_OF_TAGS, f"tag {tag} is not for extensions"
        assert tag not in self._decoders, f"tag {tag} is taken"

        def decode_extension(_walk: Decoder, node: Node) -> object:
            _, data = node
            return decode(data)

        self._extended.append(kind)
        self._encoders[kind] = lambda _, value: [tag, encode(value)]
        self._decoders[tag] = decode_extension

    def encode(self, value: object, place: Place = "args") -> Encoded:
        """Encode a value; NotSerializable says where in `place` the refused part is."""
        walk = Encoder(self._encoders, self._find_encoder, self._names, self._limits.depth)
        try:
            data = to_msgpack(walk.node(value))
            check_leaving(data, self._limits.elements)
        except NotSerializable as refusal:
            raise _placed(refusal, place) from None
        except RecursionError:
            raise NotSerializable("containers are nested deeper than Python's stack") from None
        if len(data) > self._limits.head:
            raise NotSerializable(
                f"{len(data)} bytes besides tensors are over the limit of {self._limits.head}",
                hint="send them as a tensor or a numpy array, or raise Limits(head=…) on both ends",
            )
        return Encoded(data, walk.tensors, walk.copies)

    def place_of_tensor(self, value: object, place: Place, index: int) -> str | None:
        """Where in `place` this tensor is, if known. Walks again, so only for an error."""
        if self._fallback is not None:  # a pickle has no order of tensors
            return None

        def find(walk: Encoder, tensor: Tensor) -> Node:
            if len(walk.tensors) == index and id(tensor) not in walk.places:
                raise NotSerializable
            return builtin_types.tensor_node(walk, tensor)

        # Encoding a reference counts it, which must not happen twice.
        counted = dict.fromkeys(self._extended, lambda _walk, _value: None)
        encoders = {**self._encoders, **counted, Tensor: find, Parameter: find}
        walk = Encoder(encoders, self._find_encoder, self._names, self._limits.depth)
        try:
            walk.node(value)
        except NotSerializable as found:
            return _placed(found, place).place
        return None

    def decode(self, data: bytes | memoryview, tensors: abc.Sequence[Tensor]) -> object:
        """The value that was encoded; raises BadMessage, or NotExposed for a name unknown here."""
        if len(data) > self._limits.elements:
            check_arrived(data, self._limits.elements)
        try:
            node = from_msgpack(data)
        except Exception as error:
            raise malformed(error) from error
        return self.decode_node(node, tensors)

    def decode_node(self, node: object, tensors: abc.Sequence[Tensor]) -> object:
        """The same from its skeleton."""
        walk = Decoder(self._decoders, self._names, self._limits.depth, tensors)
        try:
            value = walk.value(node)
        except GradwireError:
            raise
        except Exception as error:
            # The peer's bytes caused it, even if it was raised by a constructor or a __hash__.
            raise malformed(error) from error
        walk.done()
        return value

    def _find_encoder(self, kind: type) -> TypeEncoder:
        encoder = named_types.maybe_encoder(kind) or standard_types.ENCODERS.get(kind)
        encoder = encoder or distribution_types.maybe_encoder(kind)
        if encoder is None and issubclass(kind, BaseException):
            encoder = encode_exception
        if encoder is None and any(issubclass(kind, kinds) for kinds, *_ in _NEVER_SENT):
            encoder = _refuse
        if encoder is None:
            if self._fallback is not None:
                encoder = self._encode_fallback  # exact for any class
            elif (encoder := subclass_types.maybe_encoder(kind)) is None:
                raise _refused_type(kind)
        self._encoders[kind] = encoder
        return encoder

    def _encode_fallback(self, walk: Encoder, value: object) -> object:
        assert self._fallback is not None
        encoded, first = self._fallback.encode(value, type_name(type(value))), len(walk.tensors)
        walk.tensors.extend(encoded.tensors)
        walk.copies += encoded.copies
        return [Tag.PICKLED, encoded.data, first, len(encoded.tensors)]

    def _decode_fallback(self, walk: Decoder, node: Node) -> object:
        _, data, first, count = node
        if self._fallback is None:
            raise BadMessage("a pickle came, which this worker does not load", hint=_PICKLE_HINT)
        places = range(exactly(first, int), exactly(first, int) + exactly(count, int))
        tensors = [walk.tensor(place) for place in places]
        return self._fallback.decode(exactly(data, bytes), tensors)


def malformed(error: Exception) -> BadMessage:
    """The error for bytes of a peer that do not decode."""
    return BadMessage(f"an encoded value is malformed: {type(error).__name__}: {error}")


def _placed(refusal: NotSerializable, place: Place) -> NotSerializable:
    if isinstance(place, str):
        return refusal.inside(place)
    for index, name in enumerate(place):
        rest = refusal.place.removeprefix(f"[{index}]")
        if rest != refusal.place:
            return NotSerializable(refusal.message, place=name + rest, hint=refusal.hint)
    return refusal


def _refuse(_walk: Encoder, value: object) -> NoReturn:
    """The encoder of the types in _NEVER_SENT."""
    if isinstance(value, abc.Coroutine):
        value.close()  # or Python warns that it was never awaited
    what, hint = next(rest for kinds, *rest in _NEVER_SENT if isinstance(value, kinds))
    raise NotSerializable(f"{what.format(type(value).__name__)} cannot be serialized", hint=hint)


def _refused_type(kind: type) -> NotSerializable:
    base = next((base for base in _PLAIN_BASES if issubclass(kind, base)), None)
    if issubclass(kind, nn.Module):
        hint = (
            "make it where it runs with gradwire.RemoteModule, keep it there behind a reference "
            "(gradwire.remote), or send its state_dict()"
        )
    elif issubclass(kind, Tensor) and hasattr(kind, "full_tensor"):
        hint = "a DTensor is spread over a mesh: send its full_tensor(), or its to_local()"
    else:
        hint = _TWO_WAYS if base is None else f"send it as a plain {base.__name__}, {_TWO_WAYS}"
    return NotSerializable(f"a value of type {type_name(kind)} cannot be serialized", hint=hint)
