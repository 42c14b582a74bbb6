"""Encoder and Decoder: the walk over a value that makes a skeleton of it, and the way back.

A skeleton consists of what msgpack carries unchanged: None, bool, int, float, str and bytes stand
for themselves, and a list is a node, whose first element is the tag of its type. One walk is for
one value. It knows depth, tensors and names; how each type is encoded is in the *_types.py files.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple, TypeVar, final

from torch import Tensor

from gradwire.errors import BadMessage, NotExposed, NotSerializable, OverLimit
from gradwire.rpc.expose.names import exception_name
from gradwire.rpc.expose.registry import Registry
from gradwire.wire.message import raise_limit

Node = list[object]
TypeEncoder = Callable[["Encoder", Any], object]
TypeDecoder = Callable[["Decoder", Node], object]
Step = Callable[[Any, int], str]
Conversion = Callable[[Any], object]
Place = str | tuple[str, ...]
"""what errors call a value or, if a tuple, each of its elements"""

T = TypeVar("T")

AS_THEY_ARE = frozenset({NoneType, bool, float, bytes})
LEAVES = AS_THEY_ARE | {int, str}

FIRST_EXTENSION = 64
"""Tags from here to END_OF_TAGS belong to the callers of `Codec.extend`."""
END_OF_TAGS = 128


class Tag:
    """The first element of every node: the type of the value. New numbers are added at the end."""

    LIST, TUPLE, DICT, SET, FROZENSET, TENSOR, BIG_INT, COMPLEX, SLICE, RANGE = range(10)
    ELLIPSIS, BYTEARRAY, SURROGATES, ORDERED_DICT = range(10, 14)
    TORCH_CONSTANT, DEVICE, SIZE, ARRAY, NUMPY_SCALAR = range(14, 19)
    NAMED, ENUM, NAMED_TUPLE, DATACLASS, RETURN_TYPE, PARTS, REGISTERED, PICKLED = range(19, 27)
    RECORDS, DATE, TIME, DATETIME, TIMEDELTA, TIMEZONE, ZONE, PATH, DECIMAL = range(27, 36)
    FRACTION, UUID, DEFAULT_DICT, COUNTER, DEQUE, NAMESPACE, MEMORY = range(36, 43)
    EXCEPTION, WORKER_INFO, SAME_TENSOR, SUBCLASS, GENERATOR, DISTRIBUTION = range(43, 49)


class Encoded(NamedTuple):
    """A value as bytes, and the tensors it refers to by index; their bytes are sent separately.

    `copies` counts the tensors that require grad but are copied into the bytes, so that no gradient
    comes back to them. Only a pickle has such.
    """

    data: bytes
    tensors: list[Tensor]
    copies: int = 0


@final
class Encoder:
    """Makes a skeleton and a list of tensors of one value."""

    __slots__ = (
        "_depth",
        "_encoders",
        "_find_encoder",
        "_left",
        "_names",
        "copies",
        "places",
        "tensors",
    )

    def __init__(
        self,
        encoders: Mapping[type, TypeEncoder],
        find_encoder: Callable[[type], TypeEncoder],
        names: Registry,
        depth: int,
    ) -> None:
        self.tensors: list[Tensor] = []
        self.places: dict[int, int] = {}
        """by the id of a tensor, its index in `tensors`, which keeps it alive"""
        self.copies = 0
        self._encoders, self._find_encoder, self._names = encoders, find_encoder, names
        self._depth = self._left = depth

    def node(self, value: object) -> object:
        """The skeleton of one value. hot: every argument and result"""
        kind = type(value)
        if kind in AS_THEY_ARE:
            return value
        encoder = self._encoders.get(kind)
        if encoder is None:
            encoder = self._find_encoder(kind)
        return encoder(self, value)

    def children(self, node: Node, owner: object, values: Iterable[object], step: Step) -> Node:
        """Add the values inside `owner` to its node; `step` names the n-th for errors."""
        if not self._left:
            raise NotSerializable(
                f"containers are nested deeper than {self._depth}",
                hint="no container may hold itself; otherwise flatten it or raise Limits(depth=…)",
            )
        self._left -= 1
        first = len(node)
        encoders = self._encoders
        try:
            for value in values:  # self.node(value), inlined
                kind = type(value)
                if kind in AS_THEY_ARE:
                    node.append(value)
                else:
                    encoder = encoders.get(kind) or self._find_encoder(kind)
                    node.append(encoder(self, value))
        except NotSerializable as refusal:
            raise refusal.inside(step(owner, len(node) - first)) from None
        self._left += 1
        return node

    def exception_name(self, kind: type[BaseException]) -> str:
        """The name that stands for a type of exceptions."""
        name = exception_name(kind)
        return name if self._names.exception_type(name) is kind else self.name_of(kind)

    def name_of(self, named: Any) -> str:  # noqa: ANN401  (a function or a class)
        """The name that stands for a function or class."""
        try:
            return self._names.name_of(named)
        except NotExposed as refusal:
            raise NotSerializable(refusal.message, hint=refusal.hint) from None


@final
class Decoder:
    """Makes the value of one skeleton; anything that does not fit is a BadMessage of the peer."""

    __slots__ = ("_decoders", "_left", "_names", "_next", "_tensors")

    def __init__(
        self,
        decoders: Mapping[int, TypeDecoder],
        names: Registry,
        depth: int,
        tensors: Sequence[Tensor],
    ) -> None:
        self._decoders, self._names, self._tensors = decoders, names, tensors
        self._left = depth
        self._next = 0

    def value(self, node: object) -> object:
        """The value of one node. hot: every argument and result"""
        if type(node) is not list:
            if type(node) in LEAVES:
                return node
            raise BadMessage(f"an encoded value holds a bare {type(node).__name__}")
        tag = node[0] if node else None
        decoder = self._decoders.get(tag) if type(tag) is int else None
        if decoder is None:
            raise BadMessage(f"an encoded value has the unknown tag {reprlib.repr(tag)}")
        return decoder(self, node)

    def children(self, node: Node, first: int = 1) -> list[object]:
        """The values inside a node, from its element `first` on."""
        if not self._left:
            why = "an encoded value is nested deeper than the limit"
            raise OverLimit(why, hint=raise_limit("depth"))
        self._left -= 1
        value = self.value
        values = [child if type(child) in LEAVES else value(child) for child in node[first:]]
        self._left += 1
        return values

    def tensor(self, index: object) -> Tensor:
        """The next tensor. They are numbered in the order of the walk, so its index is known."""
        if index != self._next or self._next == len(self._tensors):
            raise BadMessage(
                f"an encoded value names tensor {reprlib.repr(index)} where {self._next} "
                f"of {len(self._tensors)} was expected"
            )
        self._next += 1
        return self._tensors[self._next - 1]

    def same_tensor(self, index: object) -> Tensor:
        """A tensor that was named before."""
        place = exactly(index, int)
        if not 0 <= place < self._next:
            raise BadMessage(f"an encoded value names tensor {place} again, which has not come")
        return self._tensors[place]

    def lookup(self, name: object) -> object:
        """The function or class of that name; raises NotExposed."""
        return self._names.lookup(exactly(name, str))

    def exception_type(self, name: object) -> type[BaseException]:
        """The type of exception of that name; raises NotExposed."""
        kind = self._names.exception_type(exactly(name, str))
        if kind is None:
            raise NotExposed(
                f"the exception {name!r:.200} is not exposed on this worker",
                hint="expose its class here, with @gradwire.expose or expose=[…]",
            )
        return kind

    def done(self) -> None:
        """Check at the end of the walk that every tensor was used."""
        if self._next != len(self._tensors):
            unused = len(self._tensors) - self._next
            raise BadMessage(f"{unused} of {len(self._tensors)} tensors belong to no value")


def exactly(value: object, kind: type[T]) -> T:
    """The value that a peer sent, if it is of exactly this type; else BadMessage."""
    if type(value) is not kind:
        shown = reprlib.repr(value)
        raise BadMessage(f"an encoded value holds {shown} where a {kind.__name__} was expected")
    return value
