"""Classes that travel as what their user makes of them.

A declaration, like @expose: filled as modules are imported, and only ever compared with what a peer
sends. What a codec makes of a value travels by the same rules as any other value; what it makes of
that again, it has to check, as a peer may send anything in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from gradwire.errors import ArgumentTypeError, NotExposed
from gradwire.rpc.codec import tags
from gradwire.rpc.codec.walk import Node, Packer, Packing, Unpacker, Unpacking, exactly
from gradwire.rpc.expose.names import plain_name

T = TypeVar("T")


class _Codec(NamedTuple):
    name: str
    pack: Callable[[Any], object]
    unpack: Callable[[Any], object]


_BY_TYPE: dict[type, _Codec] = {}
_BY_NAME: dict[str, _Codec] = {}


def register_codec(
    cls: type[T], pack: Callable[[T], object], unpack: Callable[[Any], T]
) -> type[T]:
    """Let values of exactly this class travel as what `pack` makes of them.

    That may be anything that travels. `unpack` makes the value again, on a worker that has called
    this too; it gets what a peer sent, and should raise if that makes no sense. To be called where
    the class is defined, before a value of it is sent.

    >>> gradwire.register_codec(Fraction, str, Fraction)
    """
    if not isinstance(cls, type):
        raise ArgumentTypeError(f"a codec is for a class, not for a {type(cls).__name__} object")
    codec = _Codec(plain_name(cls), pack, unpack)
    _BY_TYPE[cls] = _BY_NAME[codec.name] = codec
    return cls


def maybe_packer(kind: type) -> Packer | None:
    """How values of this type are packed, if it has a codec."""
    return _pack_registered if kind in _BY_TYPE else None


def _as_packed(_: object, __: int) -> str:
    return ""


def _pack_registered(walk: Packing, value: object) -> object:
    codec = _BY_TYPE[type(value)]
    return walk.children([tags.REGISTERED, codec.name], value, (codec.pack(value),), _as_packed)


def _unpack_registered(walk: Unpacking, node: Node) -> object:
    _, name, _ = node
    codec = _BY_NAME.get(exactly(name, str))
    if codec is None:
        raise NotExposed(
            f"{name!r:.200} has no codec on this worker",
            hint="call gradwire.register_codec there too, where the class is defined",
        )
    (data,) = walk.children(node, 2)
    return codec.unpack(data)


UNPACKERS: dict[int, Unpacker] = {tags.REGISTERED: _unpack_registered}
