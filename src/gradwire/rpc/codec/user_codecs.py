"""register_codec: how users let values of their own classes be serialized.

The table is filled as modules are imported, like that of @expose, and a peer's names are only
compared with it. What a codec makes of a value is encoded by the same rules as any other value. The
codec has to check what it decodes, because a peer may send anything instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from gradwire.errors import ArgumentTypeError, NotExposed
from gradwire.rpc.codec.walk import Decoder, Encoder, Node, Tag, TypeDecoder, TypeEncoder, exactly
from gradwire.rpc.expose.names import plain_name

T = TypeVar("T")


class _Codec(NamedTuple):
    name: str
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


_BY_TYPE: dict[type, _Codec] = {}
_BY_NAME: dict[str, _Codec] = {}


def register_codec(
    cls: type[T], encode: Callable[[T], object], decode: Callable[[Any], T]
) -> type[T]:
    """Serialize values of exactly this class as what `encode` returns for them.

    That may be anything that can be serialized. `decode` makes the value again, on a worker that
    has called this too; it gets what a peer sent, and should raise if that makes no sense. Call
    this where the class is defined, before a value of it is sent.

    >>> gradwire.register_codec(Fraction, str, Fraction)
    """
    if not isinstance(cls, type):
        raise ArgumentTypeError(f"a codec is for a class, not for a {type(cls).__name__} object")
    codec = _Codec(plain_name(cls), encode, decode)
    _BY_TYPE[cls] = _BY_NAME[codec.name] = codec
    return cls


def maybe_encoder(kind: type) -> TypeEncoder | None:
    """The encoder of this type, if it has a codec."""
    return _encode_registered if kind in _BY_TYPE else None


def _same_place(_: object, __: int) -> str:
    return ""


def _encode_registered(walk: Encoder, value: object) -> object:
    codec = _BY_TYPE[type(value)]
    return walk.children([Tag.REGISTERED, codec.name], value, (codec.encode(value),), _same_place)


def _decode_registered(walk: Decoder, node: Node) -> object:
    _, name, _ = node
    codec = _BY_NAME.get(exactly(name, str))
    if codec is None:
        raise NotExposed(
            f"{name!r:.200} has no codec on this worker",
            hint="call gradwire.register_codec there too, where the class is defined",
        )
    (data,) = walk.children(node, 2)
    return codec.decode(data)


DECODERS: dict[int, TypeDecoder] = {Tag.REGISTERED: _decode_registered}
