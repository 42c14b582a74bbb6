"""The contents of an exception, besides its type and text, as data and back.

Contents are `args`, notes, attributes that are plain data, `__cause__` and the members of a group.
Plain data are None, numbers, strings, bytes, and tuples, lists, dicts and sets of these. Any other
attribute is left out; if one of `args` is not plain, all of `args` are left out.

`__context__` is left out too: which exception was being handled is an accident of where this one
was raised. The traceback, which is sent as text, shows it. The sender leaves out what exceeds the
limits below; the receiver checks all of it before it is used. remote_errors.py makes exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from pathlib import PurePath
from types import MemberDescriptorType
from typing import Any, cast, final

import msgspec

from gradwire.agent.messages import MOST_CONTENTS
from gradwire.errors import BadMessage, GradwireError, OverLimit, RemoteError
from gradwire.wire.message import check_arrived

_MOST_VALUES = 1 << 12
_MOST_DEPTH = 16  # of nested containers, and of nested causes and groups
_MOST_LINK_TEXT = 1 << 12
_MOST_INT_BYTES = 1 << 10  # Python refuses to print longer integers

NameOf = Callable[[type[BaseException]], str]
TextOf = Callable[[BaseException], str]

NOTE = "_gradwire_note"  # the attribute of a RemoteError that holds `Failure.note`; not sent on
_OF_FAILURE = {"hint", "worker", "peer", "link", "phase", "type_name", "remote_traceback"}
OURS = frozenset({"args", "message", NOTE} | _OF_FAILURE)
"""attributes of RemoteError, which those of another exception must not replace"""
LEFT_OUT = "obj"  # of an AttributeError: the object, which the user did not mean to send
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


class Contents(msgspec.Struct, frozen=True, array_like=True):
    """The contents of an exception: values, or in a message their encoding as nodes."""

    args: list[Any] | None = None  # None if they were left out
    attributes: dict[str, Any] = {}
    notes: list[str] = []
    cause: Linked | None = None
    members: list[Linked] = []


class Linked(msgspec.Struct, frozen=True, array_like=True):
    """A cause or a member. An empty worker means that of the exception that holds it."""

    type_name: str
    text: str
    hint: str | None
    worker: str
    contents: Contents


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Contents).decode
_NOTHING = _encode(Contents())


def pack_contents(error: BaseException, name_of: NameOf, text_of: TextOf) -> bytes:
    """The contents of `error`; empty if there are none."""
    data = _encode(_ContentsEncoder(name_of, text_of).held(error, _MOST_DEPTH))
    return b"" if data == _NOTHING or len(data) > MOST_CONTENTS else data


def unpack_contents(data: bytes) -> Contents:
    """The contents of a peer's exception; BadMessage if they are malformed."""
    if not data:
        return Contents()
    check_arrived(data, 4 * _MOST_VALUES)
    try:
        return _contents(_decode(data), _MOST_DEPTH)
    except GradwireError:
        raise
    except Exception as error:  # any failure here is the fault of the peer's bytes
        raise BadMessage(f"the contents of an exception are malformed: {error}") from None


def args_of(error: BaseException) -> tuple[object, ...]:
    """Its `args`, without calling a property of that name."""
    return cast(tuple[object, ...], BaseException.__dict__["args"].__get__(error))


def members_of(error: BaseException) -> tuple[BaseException, ...]:
    """The members of a group; empty for any other exception."""
    if not isinstance(error, BaseExceptionGroup):
        return ()
    members = BaseExceptionGroup.__dict__["exceptions"].__get__(error)
    return cast(tuple[BaseException, ...], members)


def dict_of(error: BaseException) -> dict[str, Any]:
    """Its attributes, without those in slots."""
    return cast(dict[str, Any], object.__getattribute__(error, "__dict__"))


def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """The slots of a type, which hold what is not in `__dict__`: errno, filename, name, …"""
    return {
        name: raw
        for base in reversed(kind.__mro__)
        for name, raw in vars(base).items()
        if isinstance(raw, MemberDescriptorType) and not is_special(name)
    }


def set_attribute(error: BaseException, name: str, value: object, kept: Set[str] = OURS) -> None:
    """Set an attribute that a peer names, without running code of the type.

    No property and no `__setattr__` is called. A name that is a method, a property, one of `kept`
    or a name with two underscores is ignored.
    """
    if name in kept or is_special(name):
        return
    raw = found_on(type(error), name)
    if isinstance(raw, MemberDescriptorType):
        # The slot may take another type, as the start of a UnicodeError does.
        with suppress(TypeError, ValueError, OverflowError, AttributeError):
            raw.__set__(error, value)
    elif not callable(raw) and not hasattr(type(raw), "__get__"):
        dict_of(error)[name] = value


def found_on(kind: type, name: str) -> object:
    """What a type has under that name, without calling descriptors."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _ABSENT)


def is_special(name: str) -> bool:
    """Whether a peer may set no attribute of that name."""
    return name.startswith("__") or not name.isidentifier()


class _NotPlain(Exception):
    """The value is not plain data, or too large."""


@final
class _ContentsEncoder:
    """Encodes an exception with its causes and members, within one limit for all of them."""

    def __init__(self, name_of: NameOf, text_of: TextOf) -> None:
        self._name_of, self._text_of = name_of, text_of
        self._bytes, self._values = MOST_CONTENTS // 2, _MOST_VALUES
        self._seen: set[int] = set()

    def held(self, error: BaseException, depth: int) -> Contents:
        """The contents of one exception; what does not fit is left out."""
        self._seen.add(id(error))
        members = members_of(error)
        # The `args` of a group are its message and its members; the latter are not plain.
        args = self._maybe(args_of(error)[:1] if members else args_of(error))
        notes = getattr(error, "__notes__", ())
        kept = [self._maybe(note) for note in notes if isinstance(note, str)]
        texts = [note for note in kept if type(note) is str]
        links: list[Linked] = []
        for member in members:
            link = self._maybe_link(member, depth)
            if link is None:
                break
            links.append(link)
        if len(links) < len(members):
            texts.append(f"{len(members) - len(links)} more members were left out")
        return Contents(
            args[1:] if isinstance(args, list) else None,  # without the tag of the tuple
            dict(self._attributes(error)),
            texts,
            self._maybe_link(error.__cause__, depth),
            links,
        )

    def _attributes(self, error: BaseException) -> Iterator[tuple[str, object]]:
        found = dict(dict_of(error))
        for name, slot in slots_of(type(error)).items():
            with suppress(AttributeError):  # it is empty
                value = slot.__get__(error, type(error))
                if value is not None and name != LEFT_OUT:
                    found[name] = value
        for name, value in found.items():
            if type(name) is str and name not in OURS and not is_special(name):
                node = self._maybe(value)
                if node is not _ABSENT:
                    yield name, node

    def _maybe_link(self, error: BaseException | None, depth: int) -> Linked | None:
        if error is None or id(error) in self._seen or depth == 0 or self._bytes <= 0:
            return None
        name, worker = self._name_of(type(error)), ""
        if isinstance(error, RemoteError):
            name, worker = error.type_name, error.worker
        text = self._text_of(error)[:_MOST_LINK_TEXT]
        hint = error.hint if isinstance(error, GradwireError) else None
        self._bytes -= len(_encode((name, text, hint)))
        return Linked(name, text, hint, worker, self.held(error, depth - 1))

    def _maybe(self, value: object) -> object:
        """A value as plain data; `_ABSENT` if it is not plain or does not fit."""
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
    """A number or a string; one of a subclass is converted to the base class."""
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
        except UnicodeEncodeError:  # a file name may not be UTF-8
            return [_SURROGATES, text.encode("utf-8", "surrogatepass")]
        return text
    raise _NotPlain


def _contents(data: Contents, depth: int) -> Contents:
    """The same with its nodes decoded."""
    if depth < 0:
        raise OverLimit("the causes and members of an exception are nested deeper than the limit")

    def linked(link: Linked) -> Linked:
        return msgspec.structs.replace(link, contents=_contents(link.contents, depth - 1))

    return Contents(
        None if data.args is None else [_value(node, _MOST_DEPTH) for node in data.args],
        {name: _value(node, _MOST_DEPTH) for name, node in data.attributes.items()},
        data.notes,
        None if data.cause is None else linked(data.cause),
        [linked(link) for link in data.members],
    )


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
            raise OverLimit("the contents of an exception hold a number longer than the limit")
        return int.from_bytes(rest[0], "little", signed=True)
    if tag == _SURROGATES:
        return rest[0].decode("utf-8", "surrogatepass")
    return _MADE_OF[tag]([_value(each, depth - 1) for each in rest])
