"""Python values to bytes and a list of tensors, and back. Data only: no pickle.

Msgpack alone would turn tuples into lists, subclasses into their bases and big integers into
errors: our own walk (walk.py) first makes a skeleton in which every value that is not plain has a
tag, and msgpack only writes that down. Unpacking constructs exposed dataclasses, namedtuples and
enums, and runs no other code of a user's but the __hash__ and __eq__ of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar, final

import msgspec
import numpy as np
from torch import Tensor
from torch.nn import Parameter

from gradwire.errors import BadMessage, GradwireError, NotSerializable
from gradwire.options import Limits
from gradwire.rpc.codec import (
    builtin_types,
    fast_path,
    named_types,
    numpy_types,
    refused,
    tags,
    user_codecs,
)
from gradwire.rpc.codec.tags import END_OF_TAGS, FIRST_EXTENSION
from gradwire.rpc.codec.walk import (
    Names,
    Node,
    Packer,
    Packing,
    Unpacker,
    Unpacking,
    exactly,
    spoken,
)
from gradwire.wire.message import check_arrived, check_leaving

__all__ = ["Codec", "Names", "Packed", "Undecoded"]

T = TypeVar("T")

_PLAIN_BASES = (Tensor, np.ndarray, dict, list, tuple, set, frozenset, str, bytes, int, float)
_TWO_WAYS = (
    "give its class a codec with gradwire.register_codec on both workers, or let what is not data "
    "travel as pickles with Options(pickle=True) on both"
)
_PICKLE_HINT = "Options(pickle=True) loads them; whoever may send one may run anything here"


class Packed(NamedTuple):
    """A value as data, and the tensors it names; their bytes travel beside it.

    `copies` counts the tensors that require grad but are copied into the data: no gradient will
    come back to them. Only a pickle has such.
    """

    data: bytes
    tensors: list[Tensor]
    copies: int = 0


class Undecoded(msgspec.Struct, frozen=True):
    """What came, where the value takes a walk."""

    node: Any


class Fallback(Protocol):
    """A way for what is not data."""

    def pack(self, value: object, place: str) -> Packed:
        """The value in its way, and the tensors in it."""

    def unpack(self, data: bytes, tensors: Sequence[Tensor]) -> object:
        """The same again."""


@final
class Codec:
    """What travels between workers as arguments and results, and how.

    May be used by many threads at once. With `odd`, what is not data travels too, in that way.
    """

    def __init__(self, names: Names, limits: Limits, odd: Fallback | None = None) -> None:
        self._names, self._limits, self._odd = names, limits, odd
        self._is_shallow = limits.depth < fast_path.DEPTH
        self._packers: dict[type, Packer] = {
            **builtin_types.PACKERS,
            **numpy_types.PACKERS,
            **named_types.PACKERS,
        }
        self._unpackers: dict[int, Unpacker] = {
            **builtin_types.UNPACKERS,
            **numpy_types.UNPACKERS,
            **named_types.UNPACKERS,
            **user_codecs.UNPACKERS,
            tags.PICKLED: self._unpack_odd,
        }
        self._extended: list[type] = []
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[bytes | memoryview], object] = msgspec.msgpack.Decoder().decode

    def extend(
        self,
        kind: type[T],
        tag: int,
        pack: Callable[[T], object],
        unpack: Callable[[Any], object],
    ) -> None:
        """Let values of exactly this type travel as what `pack` makes of them.

        That must be plain: None, numbers, text, bytes, lists of these. A peer may send anything
        plain in its place, and `unpack` has to check it.
        """
        assert FIRST_EXTENSION <= tag < END_OF_TAGS, f"tag {tag} is not for extensions"
        assert tag not in self._unpackers, f"tag {tag} is taken"

        def unpack_node(_walk: Unpacking, node: Node) -> object:
            _, data = node
            return unpack(data)

        self._extended.append(kind)
        self._packers[kind] = lambda _, value: [tag, pack(value)]
        self._unpackers[tag] = unpack_node

    def maybe_pack(self, value: object) -> tuple[bytes, list[Tensor]] | None:
        """The same as `pack`, if it can be had without a walk: see fast_path.py.

        hot: every argument list and result
        """
        tensors: list[Tensor] = []
        node = fast_path.maybe_node(value, tensors)
        if node is fast_path.WALK or self._is_shallow:
            return None
        data = self._encode(node)
        limits = self._limits
        is_long = len(data) > limits.elements or len(data) > limits.head
        return None if is_long else (data, tensors)

    def pack(self, value: object, place: str | tuple[str, ...] = "args") -> Packed:
        """The value as data; raises NotSerializable, which says where in `place` the culprit sits.

        `place` is what errors call the value or, for a tuple, each of its elements.
        """
        walk = Packing(self._packers, self._learn, self._names, self._limits.depth)
        try:
            data = self._encode(walk.node(value))
            check_leaving(data, self._limits.elements)
        except NotSerializable as refusal:
            raise _placed(refusal, place) from None
        except RecursionError:
            raise NotSerializable("containers are nested deeper than Python's stack") from None
        if len(data) > self._limits.head:
            raise NotSerializable(
                f"{len(data)} bytes besides tensors are over the limit of {self._limits.head}",
                hint="send them as a tensor or a numpy array, or raise Limits.head",
            )
        return Packed(data, walk.tensors, walk.copies)

    def place_of_tensor(
        self, value: object, place: str | tuple[str, ...], index: int
    ) -> str | None:
        """Where in `place` the tensor of that number sits, in the order of `pack`.

        None if that is not known, as inside a pickle. For an error: it walks once more.
        """
        if self._odd is not None:
            return None

        def find(walk: Packing, tensor: Tensor) -> Node:
            if len(walk.tensors) == index:
                raise NotSerializable
            return builtin_types.pack_tensor(walk, tensor)

        # References are counted when they are packed: not again.
        counted = dict.fromkeys(self._extended, lambda _walk, _value: None)
        packers = {**self._packers, **counted, Tensor: find, Parameter: find}
        walk = Packing(packers, self._learn, self._names, self._limits.depth)
        try:
            walk.node(value)
        except NotSerializable as found:
            return _placed(found, place).place
        return None

    def maybe_unpack(self, data: bytes | memoryview, tensors: Sequence[Tensor]) -> object:
        """The value that was packed; Undecoded, if that takes a walk. Raises as `unpack` does.

        hot: every argument list and result
        """
        if len(data) > self._limits.elements:
            check_arrived(data, self._limits.elements)
        try:
            node = self._decode(data)
        except Exception as error:
            raise _malformed(error) from error
        value = fast_path.WALK if self._is_shallow else fast_path.maybe_value(node, tensors)
        return Undecoded(node) if value is fast_path.WALK else value

    def open(self, unopened: Undecoded, tensors: Sequence[Tensor]) -> object:
        """The value that `maybe_unpack` left to a walk."""
        walk = Unpacking(self._unpackers, self._names, self._limits.depth, tensors)
        try:
            value = walk.value(unopened.node)
        except GradwireError:
            raise
        except Exception as error:
            # Whatever a peer's bytes lead to, in a constructor or a __hash__, is the peer's.
            raise _malformed(error) from error
        walk.done()
        return value

    def unpack(self, data: bytes | memoryview, tensors: Sequence[Tensor]) -> object:
        """The value that was packed; raises BadMessage, or NotExposed for a name unknown here."""
        value = self.maybe_unpack(data, tensors)
        return self.open(value, tensors) if type(value) is Undecoded else value

    def _learn(self, kind: type) -> Packer:
        packer = user_codecs.maybe_packer(kind) or named_types.maybe_packer(kind)
        if packer is None and refused.maybe_refusal(kind) is not None:
            packer = _refuse
        if packer is None and self._odd is not None:
            packer = self._pack_odd
        if packer is None:
            raise _refusal(kind)
        self._packers[kind] = packer
        return packer

    def _pack_odd(self, walk: Packing, value: object) -> object:
        assert self._odd is not None
        packed, first = self._odd.pack(value, spoken(type(value))), len(walk.tensors)
        walk.tensors.extend(packed.tensors)
        walk.copies += packed.copies
        return [tags.PICKLED, packed.data, first, len(packed.tensors)]

    def _unpack_odd(self, walk: Unpacking, node: Node) -> object:
        _, data, first, count = node
        if self._odd is None:
            raise BadMessage("a pickle came, which this worker does not load", hint=_PICKLE_HINT)
        places = range(exactly(first, int), exactly(first, int) + exactly(count, int))
        tensors = [walk.tensor(place) for place in places]
        return self._odd.unpack(exactly(data, bytes), tensors)


def _malformed(error: Exception) -> BadMessage:
    return BadMessage(f"a packed value is malformed: {type(error).__name__}: {error}")


def _placed(refusal: NotSerializable, place: str | tuple[str, ...]) -> NotSerializable:
    if isinstance(place, str):
        return refusal.inside(place)
    for index, name in enumerate(place):
        step = f"[{index}]"
        if refusal.place.startswith(step):
            rest = refusal.place.removeprefix(step)
            return NotSerializable(refusal.message, place=name + rest, hint=refusal.hint)
    return refusal


def _refuse(_walk: Packing, value: object) -> NoReturn:
    refusal = refused.maybe_refusal(type(value))
    assert refusal is not None, f"{type(value).__name__} was refused without a reason"
    refused.refuse(refusal, value)


def _refusal(kind: type) -> NotSerializable:
    advice = refused.maybe_hint(kind)
    if advice is not None:
        return NotSerializable(f"a value of type {spoken(kind)} does not travel", hint=advice)
    base = next((base for base in _PLAIN_BASES if issubclass(kind, base)), None)
    hint = _TWO_WAYS if base is None else f"send it as a plain {base.__name__}, {_TWO_WAYS}"
    return NotSerializable(f"a value of type {spoken(kind)} does not travel", hint=hint)
