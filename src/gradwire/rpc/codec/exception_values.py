"""Encodes exceptions that are values: arguments, results, or inside of them.

One arrives as its own type, with args, attributes, notes, cause and members, and without what hangs
on the place where it was raised: traceback and context. No code of the type runs. (An exception
that a function raises takes another way, and arrives as a RemoteError: agent/remote_errors.py.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

from gradwire.agent.exception_contents import (
    LEFT_OUT,
    args_of,
    dict_of,
    is_special,
    members_of,
    set_attribute,
    slots_of,
)
from gradwire.agent.remote_errors import empty_instance, set_args, set_cause
from gradwire.errors import BadMessage, NotSerializable, RemoteError
from gradwire.rpc.codec.walk import Decoder, Encoder, Node, Tag, exactly

_NOTES = "__notes__"
_OF_GROUPS = ("message", "exceptions")
"""the slots of a group, which its constructor fills"""
_PARTS = (".args", ".__dict__", ".__cause__", ".exceptions")


def encode_exception(walk: Encoder, value: BaseException) -> object:
    """The node of an exception; NotSerializable if something that it holds is not data."""
    kind = type(value)
    if isinstance(value, RemoteError):
        raise NotSerializable(
            f"a {kind.__name__}, which another worker has raised, cannot be serialized",
            hint="raise it, or send str(error)",
        )
    held = dict(_attributes(value))
    members = members_of(value)
    args = args_of(value)[:1] if members else args_of(value)
    parts = (args, held, value.__cause__, members)
    node: Node = [Tag.EXCEPTION, walk.exception_name(kind)]
    return walk.children(node, value, parts, lambda _, n: _PARTS[n])


def _attributes(value: BaseException) -> Iterator[tuple[str, object]]:
    kind = type(value)
    for name, slot in slots_of(kind).items():
        with suppress(AttributeError):  # it is empty
            attribute = slot.__get__(value, kind)
            if attribute is not None and name not in (LEFT_OUT, *_OF_GROUPS):
                yield name, attribute
    for name, attribute in dict_of(value).items():
        if name != _NOTES and is_special(name):
            raise NotSerializable(
                f"a {kind.__name__} with the attribute {name!r:.80} cannot be serialized",
                hint="give it another name",
            )
        yield name, attribute


def decode_exception(walk: Decoder, node: Node) -> object:
    """The exception of a node."""
    kind = walk.exception_type(node[1])
    args, held, cause, members = walk.children(node, 2)
    exactly(args, tuple)
    exactly(held, dict)
    if not all(isinstance(each, BaseException) for each in exactly(members, tuple)):
        raise BadMessage("an encoded group holds what is no exception")
    parts: Any = args, members  # they are tuples
    value = empty_instance(kind, parts[0][0] if args else None, parts[1])
    if not isinstance(value, BaseExceptionGroup):
        set_args(value, args)
    for name, attribute in cast(dict[str, object], held).items():
        if name == _NOTES:
            dict_of(value)[name] = [exactly(note, str) for note in exactly(attribute, list)]
        else:
            set_attribute(value, exactly(name, str), attribute, kept=frozenset())
    if cause is not None:
        if not isinstance(cause, BaseException):
            raise BadMessage(f"an encoded exception has a {type(cause).__name__} as its cause")
        set_cause(value, cause)
    return value
