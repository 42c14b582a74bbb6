"""What an exception holds besides its type and its text, as data, and back.

Its `args`, its notes, its attributes that are plain data, its `__cause__` and, of a group, its
members. Plain data are None, numbers, texts, bytes, and tuples, lists, dicts and sets of these. An
attribute that is something else stays behind; if one of `args` is, all of them do.

Not `__context__`: which exception was being handled is an accident of where one was raised. It is
in the traceback, which travels as text.

A sender leaves out what is over the bounds below. A receiver checks the whole before anything is
made of it, and makes no exceptions here: remote_errors.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from types import MappingProxyType, MemberDescriptorType
from typing import Any, NamedTuple, final

import msgspec

from gradwire.agent.messages import MOST_CONTENTS
from gradwire.errors import BadMessage, GradwireError, OverLimit, RemoteError
from gradwire.wire.message import check_arrived

_MOST_VALUES = 1 << 12
_MOST_DEPTH = 16
"""of containers within containers, and of causes and groups within one another"""
_MOST_LINK_TEXT = 1 << 12
_MOST_INT_BYTES = 1 << 10
"""Python refuses to print longer ones"""

NameOf = Callable[[type[BaseException]], str]
TextOf = Callable[[BaseException], str]

NOTE = "_gradwire_note"
"""the attribute of a RemoteError that holds `Failure.note`; it does not travel any further"""
OURS = frozenset(
    {"args", "message", "hint", "worker", "peer", "link", "phase", "type_name", "remote_traceback"}
    | {NOTE}
)
"""attributes of a RemoteError, which those of another exception must not replace"""
# Of an AttributeError: the whole object that lacks the attribute, which nobody meant to send.
_LEFT_BEHIND = frozenset({"obj"})
_ABSENT = object()

_TUPLE, _LIST, _DICT, _SET, _FROZENSET, _BIG_INT, _SURROGATES = range(7)
_CONTAINERS: Mapping[type, int] = {tuple: _TUPLE, list: _LIST, set: _SET, frozenset: _FROZENSET}
_MADE_OF: Mapping[int, Callable[[list[Any]], object]] = {
    _TUPLE: tuple,
    _LIST: list,
    _SET: set,
    _FROZENSET: frozenset,
    _DICT: lambda flat: dict(zip(flat[::2], flat[1::2], strict=True)),
}


class _Held(msgspec.Struct, frozen=True, array_like=True):
    args: list[Any] | None = None
    attributes: dict[str, Any] = {}
    notes: list[str] = []
    cause: _Link | None = None
    members: list[_Link] = []


class _Link(msgspec.Struct, frozen=True, array_like=True):
    type_name: str
    text: str
    hint: str | None
    worker: str
    held: _Held


class Contents(NamedTuple):
    """What an exception held. `args` is None if they did not travel."""

    args: tuple[object, ...] | None = None
    attributes: Mapping[str, object] = MappingProxyType({})
    notes: tuple[str, ...] = ()
    cause: Linked | None = None
    members: tuple[Linked, ...] = ()


class Linked(NamedTuple):
    """A cause or a member. An empty worker is that of the exception that holds it."""

    type_name: str
    text: str
    hint: str | None
    worker: str
    contents: Contents


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Held).decode
_NOTHING = _encode(_Held())


def pack_contents(error: BaseException, name_of: NameOf, text_of: TextOf) -> bytes:
    """What `error` holds; empty if that is nothing."""
    data = _encode(_Packing(name_of, text_of).held(error, _MOST_DEPTH))
    return b"" if data == _NOTHING or len(data) > MOST_CONTENTS else data


def unpack_contents(data: bytes) -> Contents:
    """What a peer's exception held; raises BadMessage."""
    if not data:
        return Contents()
    check_arrived(data, 4 * _MOST_VALUES)
    try:
        return _contents(_decode(data), _MOST_DEPTH)
    except GradwireError:
        raise
    except Exception as error:  # whatever a peer's bytes lead to is the peer's
        raise BadMessage(f"the contents of an exception are malformed: {error}") from None


def args_of(error: BaseException) -> tuple[object, ...]:
    """Its `args`, whatever a property of that name would say."""
    args: tuple[object, ...] = BaseException.__dict__["args"].__get__(error)
    return args


def members_of(error: BaseException) -> tuple[BaseException, ...]:
    """The members of a group; none of any other exception."""
    if not isinstance(error, BaseExceptionGroup):
        return ()
    members: tuple[BaseException, ...] = BaseExceptionGroup.__dict__["exceptions"].__get__(error)
    return members


def dict_of(error: BaseException) -> dict[str, Any]:
    """Its attributes, without those that lie in slots."""
    attributes: dict[str, Any] = object.__getattribute__(error, "__dict__")
    return attributes


def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """Where exceptions of a type keep what is not in their `__dict__`: errno, filename, name, …"""
    return {
        name: raw
        for base in reversed(kind.__mro__)
        for name, raw in vars(base).items()
        if isinstance(raw, MemberDescriptorType) and not _is_special(name)
    }


def set_attribute(error: BaseException, name: str, value: object) -> None:
    """Set what a peer names, without any code of the type's: no property, no `__setattr__`.

    Left out is what would replace something else than data: a method, a property, what a
    RemoteError says of itself, what Python keeps under two underscores.
    """
    if name in OURS or _is_special(name):
        return
    raw = found_on(type(error), name)
    if isinstance(raw, MemberDescriptorType):
        try:
            raw.__set__(error, value)
        except (TypeError, ValueError, OverflowError, AttributeError):
            return  # no value for that slot, as a text for the start of a UnicodeError
    elif not callable(raw) and not hasattr(type(raw), "__get__"):
        dict_of(error)[name] = value


def found_on(kind: type, name: str) -> object:
    """What a type has under that name, as it stands there."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _ABSENT)


def _is_special(name: str) -> bool:
    return name.startswith("__") or not name.isidentifier()


class _NotPlain(Exception):
    """It is no plain data, or too much."""


@final
class _Packing:
    """The contents of an exception, its causes and members, within one bound for all of them."""

    def __init__(self, name_of: NameOf, text_of: TextOf) -> None:
        self._name_of, self._text_of = name_of, text_of
        self._bytes, self._values = MOST_CONTENTS // 2, _MOST_VALUES
        self._seen: set[int] = set()

    def held(self, error: BaseException, depth: int) -> _Held:
        """What one exception holds; raises nothing for what does not fit."""
        self._seen.add(id(error))
        members = members_of(error)
        # Those of a group are its message and its members, which are not plain.
        args = self._maybe(args_of(error)[:1] if members else args_of(error))
        notes = getattr(error, "__notes__", ())
        kept = [self._maybe(note) for note in notes if isinstance(note, str)]
        told = [note for note in kept if type(note) is str]
        links = self._links(members, depth)
        if len(links) < len(members):
            told.append(f"{len(members) - len(links)} more members did not travel")
        return _Held(
            args[1:] if isinstance(args, list) else None,  # without the tag of the tuple
            dict(self._attributes(error)),
            told,
            self._maybe_link(error.__cause__, depth),
            links,
        )

    def _attributes(self, error: BaseException) -> Iterator[tuple[str, object]]:
        found = dict(dict_of(error))
        for name, slot in slots_of(type(error)).items():
            value = slot.__get__(error, type(error)) if _is_set(slot, error) else None
            if value is not None and name not in _LEFT_BEHIND:
                found[name] = value
        for name, value in found.items():
            if type(name) is str and name not in OURS and not _is_special(name):
                node = self._maybe(value)
                if node is not _ABSENT:
                    yield name, node

    def _links(self, members: tuple[BaseException, ...], depth: int) -> list[_Link]:
        links = []
        for member in members:
            link = self._maybe_link(member, depth)
            if link is None:
                break
            links.append(link)
        return links

    def _maybe_link(self, error: BaseException | None, depth: int) -> _Link | None:
        if error is None or id(error) in self._seen or depth == 0 or self._bytes <= 0:
            return None
        name, worker = self._name_of(type(error)), ""
        if isinstance(error, RemoteError):
            name, worker = error.type_name, error.worker
        text = self._text_of(error)[:_MOST_LINK_TEXT]
        hint = error.hint if isinstance(error, GradwireError) else None
        self._bytes -= len(_encode((name, text, hint)))
        return _Link(name, text, hint, worker, self.held(error, depth - 1))

    def _maybe(self, value: object) -> object:
        """The node of a value, if it is plain data and there is room for it."""
        values = self._values
        try:
            node = self._node(value, _MOST_DEPTH)
            size = len(_encode(node))
            if size > self._bytes:
                raise _NotPlain
        except _NotPlain:
            self._values = values
            return _ABSENT
        self._bytes -= size
        return node

    def _node(self, value: object, depth: int) -> Any:  # noqa: ANN401
        self._values -= 1
        if self._values < 0 or depth < 0:
            raise _NotPlain
        if value is None or type(value) in (bool, float, bytes):
            return value
        container = _CONTAINERS.get(type(value))
        if container is not None:
            return [container, *[self._node(each, depth - 1) for each in value]]  # type: ignore[attr-defined]
        if type(value) is dict:
            flat = [part for item in value.items() for part in item]
            return [_DICT, *[self._node(part, depth - 1) for part in flat]]
        return _leaf(value)


def _leaf(value: object) -> object:
    """A number or a text, of a subclass too: as the base that it is equal to."""
    if isinstance(value, PurePath):
        value = str(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        if -(1 << 63) <= number < 1 << 64:
            return number
        if number.bit_length() >= 8 * _MOST_INT_BYTES:
            raise _NotPlain
        return [_BIG_INT, number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)]
    if isinstance(value, str):
        text = str.__str__(value)
        try:
            text.encode()
        except UnicodeEncodeError:  # the name of a file may be no UTF-8
            return [_SURROGATES, text.encode("utf-8", "surrogatepass")]
        return text
    raise _NotPlain


def _is_set(slot: MemberDescriptorType, error: BaseException) -> bool:
    try:
        slot.__get__(error, type(error))
    except AttributeError:
        return False
    return True


def _contents(held: _Held, depth: int) -> Contents:
    if depth < 0:
        raise OverLimit("the causes and members of an exception are nested deeper than the limit")
    return Contents(
        None if held.args is None else tuple([_value(node, _MOST_DEPTH) for node in held.args]),
        {name: _value(node, _MOST_DEPTH) for name, node in held.attributes.items()},
        tuple(held.notes),
        None if held.cause is None else _linked(held.cause, depth - 1),
        tuple([_linked(link, depth - 1) for link in held.members]),
    )


def _linked(link: _Link, depth: int) -> Linked:
    return Linked(link.type_name, link.text, link.hint, link.worker, _contents(link.held, depth))


def _value(node: object, depth: int) -> object:
    if type(node) is not list:
        if node is None or type(node) in (bool, int, float, str, bytes):
            return node
        raise BadMessage(f"the contents of an exception hold a bare {type(node).__name__}")
    if depth < 0:
        raise OverLimit("the contents of an exception are nested deeper than the limit")
    tag, *rest = node
    if tag == _BIG_INT:
        if len(rest[0]) > _MOST_INT_BYTES:
            raise OverLimit("the contents of an exception hold a longer number than the limit")
        return int.from_bytes(rest[0], "little", signed=True)
    if tag == _SURROGATES:
        return rest[0].decode("utf-8", "surrogatepass")
    return _MADE_OF[tag]([_value(each, depth - 1) for each in rest])
