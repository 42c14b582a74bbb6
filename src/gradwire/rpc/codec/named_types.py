"""Encodes values by a name: functions, classes, enums, namedtuples, dataclasses, and those that
have a codec of the user's.

An enum is sent as the name of its member, a namedtuple or dataclass as its fields, with their names
so that two versions of a class do not silently swap its values. A dataclass is rebuilt field by
field without its constructor, as `copy` does: `__init__` takes no init=False fields and needs
InitVars that were not kept, `__post_init__` would convert the fields a second time, and frozen
classes and slots need no special case. So only fields can arrive, and an instance with other
attributes is refused; values of a cached_property are dropped, to be computed again.

A user's codec turns a value into others, which are encoded by the same rules. The table of codecs
is filled as modules are imported, like that of @expose, and a peer's names are only compared with
it. The codec has to check what it decodes, because a peer may send anything instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from enum import Enum, Flag
from functools import cached_property
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any, TypeVar, cast

import torch

from gradwire.errors import ArgumentTypeError, BadMessage, NotExposed, NotSerializable
from gradwire.rpc.codec.builtin_types import by_index
from gradwire.rpc.codec.walk import Decoder, Encoder, Node, Tag, TypeDecoder, TypeEncoder, exactly
from gradwire.rpc.expose.names import plain_name, type_name

T = TypeVar("T")

_RETURN_TYPES = {
    kind.__name__: kind
    for kind in vars(torch.return_types).values()
    if isinstance(kind, type) and kind.__module__ == "torch.return_types"
}
# CPython sets this flag on every class made by a class statement.
_IS_HEAP_TYPE = 1 << 9

_BY_TYPE: dict[type, tuple[str, Callable[[Any], object]]] = {}
_BY_NAME: dict[str, Callable[[Any], object]] = {}


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
    name = plain_name(cls)
    _BY_TYPE[cls], _BY_NAME[name] = (name, encode), decode
    return cls


def _encode_registered(walk: Encoder, value: object) -> object:
    name, encode = _BY_TYPE[type(value)]
    return walk.children([Tag.REGISTERED, name], value, (encode(value),), lambda *_: "")


def _decode_registered(walk: Decoder, node: Node) -> object:
    _, name, _ = node
    decode = _BY_NAME.get(exactly(name, str))
    if decode is None:
        raise NotExposed(
            f"{name!r:.200} has no codec on this worker",
            hint="call gradwire.register_codec there too, where the class is defined",
        )
    return decode(*walk.children(node, 2))


def maybe_encoder(kind: type) -> TypeEncoder | None:
    """The encoder of a type that was not seen before, if its values are sent by a name."""
    if kind in _BY_TYPE:
        return _encode_registered
    if issubclass(kind, type):
        return _encode_named
    if issubclass(kind, Enum):
        return _encode_enum
    if issubclass(kind, tuple):
        return _encode_named_tuple if hasattr(kind, "_fields") else None
    if dataclasses.is_dataclass(kind) and _is_made_of_fields(kind):
        return _encode_dataclass
    if hasattr(kind, "_to_parts"):
        return _encode_parts
    return None


def _class(walk: Decoder, name: object, base: type[T]) -> type[T]:
    kind = walk.lookup(name)
    if isinstance(kind, type) and issubclass(kind, base):
        return kind
    raise BadMessage(f"{name} is no {base.__name__} here")


def _encode_named(walk: Encoder, value: object) -> object:
    return [Tag.NAMED, walk.name_of(value)]


def _encode_enum(walk: Encoder, value: Enum) -> object:
    kind = type(value)
    # A combination of flags has a value, but no name.
    member = value.name if value.name in kind.__members__ else walk.node(value.value)
    return [Tag.ENUM, walk.name_of(kind), member]


def _decode_enum(walk: Decoder, node: Node) -> object:
    _, name, member = node
    kind = _class(walk, name, Enum)
    if type(member) is str:
        return kind.__members__[member]
    return _class(walk, name, Flag)(exactly(walk.value(member), int))


def _fields_of(kind: type[Any]) -> tuple[str, ...]:
    """The fields of a namedtuple or dataclass; none of another tuple that a peer names."""
    if issubclass(kind, tuple):
        return cast(tuple[str, ...], getattr(kind, "_fields", ()))
    return tuple(field.name for field in dataclasses.fields(kind))


def _encode_named_tuple(walk: Encoder, value: tuple[object, ...]) -> object:
    _refuse_more(type(value), getattr(value, "__dict__", {}).keys())
    return _encode_fields(walk, Tag.NAMED_TUPLE, value, value)


def _encode_fields(walk: Encoder, tag: int, value: object, items: Iterable[object]) -> object:
    kind = type(value)
    names = _fields_of(kind)
    node: Node = [tag, walk.name_of(kind), ",".join(names)]
    return walk.children(node, value, items, lambda _, n: f".{names[n]}")


def _decode_named_tuple(walk: Decoder, node: Node) -> object:
    kind = _class(walk, node[1], tuple)
    # Not the class's own constructor: in a subclass it may take other arguments.
    return tuple.__new__(kind, _values_of_fields(walk, node, kind))


def _values_of_fields(walk: Decoder, node: Node, kind: type) -> list[object]:
    _, _, told, *items = node
    known, count = _fields_of(kind), len(items)
    if told != ",".join(known) or count != len(known):
        raise BadMessage(
            f"{count} values came as the fields {told} of {type_name(kind)}, which here are "
            f"{','.join(known) or 'none'}",
            hint="run the same version of the program on every worker",
        )
    return walk.children(node, 3)


def _encode_dataclass(walk: Encoder, value: object) -> object:
    kind = type(value)
    names = _fields_of(kind)
    _refuse_more(kind, attributes_of(value) - set(names))
    missing = [name for name in names if not hasattr(value, name)]
    if missing:
        raise NotSerializable(
            f"a {type_name(kind)} without a value for {', '.join(missing)} cannot be serialized",
            hint="give every field a value or a default",
        )
    return _encode_fields(walk, Tag.DATACLASS, value, [getattr(value, name) for name in names])


def _decode_dataclass(walk: Decoder, node: Node) -> object:
    kind = _class(walk, node[1], object)
    if not dataclasses.is_dataclass(kind) or not _is_made_of_fields(kind):
        raise BadMessage(f"{node[1]} is no dataclass here")
    value = object.__new__(kind)
    for field, item in zip(_fields_of(kind), _values_of_fields(walk, node, kind), strict=True):
        object.__setattr__(value, field, item)
    return value


def _is_made_of_fields(kind: type) -> bool:
    """Whether instances hold nothing but attributes: the class derives from no builtin type."""
    return next(base for base in kind.__mro__ if not base.__flags__ & _IS_HEAP_TYPE) is object


def attributes_of(value: object) -> set[str]:
    """The attributes of an instance that are not computed, in its dict or in a slot of a class."""
    slots, computed = set[str](), set[str]()
    for base in type(value).__mro__:
        declared = vars(base).get("__slots__", ())
        slots |= {declared} if isinstance(declared, str) else set(declared)
        attributes = vars(base).items()
        computed |= {name for name, one in attributes if isinstance(one, cached_property)}
    slots = {slot for slot in slots - {"__dict__", "__weakref__"} if hasattr(value, slot)}
    return (slots | getattr(value, "__dict__", {}).keys()) - computed


def _refuse_more(kind: type, attributes: Collection[str]) -> None:
    if attributes:
        raise NotSerializable(
            f"a {type_name(kind)} with attributes besides its fields cannot be serialized: "
            f"{', '.join(sorted(attributes))}",
            hint="make them fields, or send them beside it",
        )


def _encode_return_type(walk: Encoder, value: tuple[object, ...]) -> object:
    return walk.children([Tag.RETURN_TYPE, type(value).__name__], value, value, by_index)


def _decode_return_type(walk: Decoder, node: Node) -> object:
    return _RETURN_TYPES[exactly(node[1], str)](walk.children(node, 2))


def _encode_parts(walk: Encoder, value: Any) -> object:  # noqa: ANN401
    # A class of a higher layer, such as RemoteModule, that is sent as a few values. Its class
    # method _from_parts makes the object again, and has to check what a peer sent.
    node: Node = [Tag.PARTS, walk.name_of(type(value))]
    return walk.children(node, value, value._to_parts(), by_index)


def _decode_parts(walk: Decoder, node: Node) -> object:
    kind: Any = _class(walk, node[1], object)
    if not hasattr(kind, "_to_parts"):
        raise BadMessage(f"{node[1]} is not made of parts here")
    return kind._from_parts(*walk.children(node, 2))


ENCODERS: dict[type, TypeEncoder] = {
    FunctionType: _encode_named,
    BuiltinFunctionType: _encode_named,
    MethodDescriptorType: _encode_named,
    type: _encode_named,
    **dict.fromkeys(_RETURN_TYPES.values(), _encode_return_type),
}

DECODERS: dict[int, TypeDecoder] = {
    Tag.NAMED: lambda walk, node: walk.lookup(*node[1:]),
    Tag.ENUM: _decode_enum,
    Tag.NAMED_TUPLE: _decode_named_tuple,
    Tag.DATACLASS: _decode_dataclass,
    Tag.RETURN_TYPE: _decode_return_type,
    Tag.PARTS: _decode_parts,
    Tag.REGISTERED: _decode_registered,
}
