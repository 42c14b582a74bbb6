"""Exceptions as data (`describe`), and back (`revive`).

An exception is sent as the name of its type, its text, its traceback and its contents
(exception_contents.py). The receiver looks up only types that it knows (builtins, gradwire's,
exposed ones). It imports nothing for a peer, and calls no constructor.
"""

from __future__ import annotations

import copy
import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeVar, cast

import msgspec

from gradwire.agent import exception_contents as data
from gradwire.agent.messages import Failure
from gradwire.errors import BadMessage, GradwireError, NotSerializable, RemoteError
from gradwire.wire.message import encode

T = TypeVar("T", bound=BaseException)

_log = logging.getLogger("gradwire")
_MOST_TEXT = 1 << 20
_UNKNOWN = "builtins:Exception"
_plain_name = type.__dict__["__name__"].__get__  # whatever its metaclass does
set_args = BaseException.__dict__["args"].__set__
set_cause = BaseException.__dict__["__cause__"].__set__
_IS_HEAP_TYPE = 1 << 9  # set by CPython on every class that a class statement made
_MOST_TRACEBACK = 1 << 14  # characters, of all workers that an exception has passed

NameOf = Callable[[type[BaseException]], str]
TypeOf = Callable[[str], type[BaseException] | None]


def describe(error: BaseException, worker: str, name_of: NameOf) -> Failure:
    """An exception raised on `worker`, as data for the caller.

    One that came from another worker keeps its name; each worker that it passes adds its traceback.
    Its class may raise anything when it is printed: the caller gets an answer all the same.
    """
    try:
        return _described(error, worker, name_of)
    except BaseException as failed:
        is_main = threading.current_thread() is threading.main_thread()
        if isinstance(failed, KeyboardInterrupt) and is_main:
            raise
        text = (
            f"an exception that cannot be described: to print it raised {_plain_name(type(failed))}"
        )
        return Failure(_UNKNOWN, text, None, "", worker)


def _described(error: BaseException, worker: str, name_of: NameOf) -> Failure:
    trace = _safe(lambda e: "".join(traceback.format_exception(e)), error, _MOST_TRACEBACK)
    text, contents = _safe(_text, error), b""
    try:
        contents = data.pack_contents(error, name_of, partial(_safe, _text))
    except Exception:  # a user's type may have properties that raise
        _log.debug("the contents of a %s were left out", type(error).__name__, exc_info=True)
    if isinstance(error, RemoteError):
        name, worker = error.type_name, error.worker
    else:
        name = name_of(type(error))
    if not isinstance(error, GradwireError):
        return Failure(name, text, None, trace, worker, contents=contents)
    about = (error.peer, error.link, error.phase)
    return Failure(name, text, error.hint, trace, worker, *about, contents)


def noted(failure: Failure, note: bytes) -> Failure:
    """The same, with the note of the layer above."""
    return msgspec.structs.replace(failure, note=note) if note else failure


def note_of(error: RemoteError) -> bytes:
    """The note that the layer above has sent with this exception."""
    return cast(bytes, data.dict_of(error).get(data.NOTE, b""))


def clipped(failure: Failure, most: int) -> Failure:
    """The same; if it is larger than that, the end of its traceback and the start of its text."""
    if len(encode(failure)) <= most:
        return failure
    text, trace = failure.text[: most // 8], failure.traceback[-(most // 8) :]
    return msgspec.structs.replace(
        failure, text=text, traceback=trace, hint=None, contents=b"", note=b""
    )


def revive(failure: Failure, type_of: TypeOf) -> RemoteError:
    """The exception to raise here: a RemoteError that is also of the original type, if known.

    No code of the original type runs: its contents are set as data. If an instance cannot be made
    that way, it is a plain RemoteError. Malformed contents are left out: the waiting thread must
    get the failure itself.
    """
    try:
        contents = data.unpack_contents(failure.contents)
    except BadMessage:
        _log.debug("the contents of a %s were left out", failure.type_name, exc_info=True)
        contents = data.Contents()
    error = _made(failure, contents, type_of)
    if failure.note:
        data.dict_of(error)[data.NOTE] = failure.note
    return error


def _made(failure: Failure, contents: data.Contents, type_of: TypeOf) -> RemoteError:
    members = [_made_of_link(link, failure.worker, type_of) for link in contents.members]
    error = RemoteError.__new__(RemoteError)
    original = type_of(failure.type_name)
    try:
        remote = _maybe_remote_type(original)  # type: ignore[arg-type]  # classes are hashable
        if remote is not None:
            error = empty_instance(remote, contents.args[0] if contents.args else None, members)
    except Exception:  # e.g. a group whose message or members were left out
        _log.debug("%s could not be made again", failure.type_name, exc_info=True)
    if not isinstance(error, BaseExceptionGroup):  # its constructor has set both
        set_args(error, (failure.text,) if contents.args is None else tuple(contents.args))
        data.dict_of(error)["message"] = failure.text
    names = ("hint", "worker", "peer", "link", "phase", "type_name")
    data.dict_of(error).update({name: getattr(failure, name) for name in names})
    data.dict_of(error)["remote_traceback"] = failure.traceback
    for name, value in contents.attributes.items():
        data.set_attribute(error, name, value)
    if contents.notes:
        data.dict_of(error)["__notes__"] = contents.notes
    if contents.cause is not None:
        set_cause(error, _made_of_link(contents.cause, failure.worker, type_of))
    return error


def _made_of_link(link: data.Linked, worker: str, type_of: TypeOf) -> RemoteError:
    """A cause or a member: its traceback is part of that of the exception that holds it."""
    failure = Failure(link.type_name, link.text, link.hint, "", link.worker or worker)
    return _made(failure, link.contents, type_of)


def fresh(error: BaseException) -> BaseException:
    """A copy to raise: the stored one must not collect the frames of every waiting thread."""
    try:
        again = _copied(error) if isinstance(error, RemoteError) else copy.copy(error)
    except Exception:  # its constructor needs more than `args`
        return error
    if type(again) is not type(error):
        return error
    # In this order: setting the cause changes __suppress_context__.
    for name in ("__cause__", "__context__", "__suppress_context__"):
        slot = BaseException.__dict__[name]
        slot.__set__(again, slot.__get__(error))
    return BaseException.with_traceback(again, error.__traceback__)


def _copied(error: RemoteError) -> BaseException:
    """A copy made without the constructor, which may not accept `args`."""
    kind = type(error)
    again = empty_instance(kind, error.message, data.members_of(error))
    set_args(again, data.args_of(error))
    for slot in data.slots_of(kind).values():
        with suppress(AttributeError, TypeError):  # it is empty or read-only
            slot.__set__(again, slot.__get__(error, kind))
    data.dict_of(again).update(data.dict_of(error))
    return again


def _safe(text_of: data.TextOf, error: BaseException, most: int = _MOST_TEXT) -> str:
    """A text as valid UTF-8 of limited length, even if printing the exception fails."""
    try:
        said = text_of(error)
    except Exception as failed:
        return f"(it cannot be printed: {type(failed).__name__})"
    if len(said) > most:  # a traceback begins on the last worker, and ends on the one that raised
        said = f"{said[: most // 4]}\n…\n{said[-(most - most // 4) :]}"
    return said.encode("utf-8", "backslashreplace").decode()


def _text(error: BaseException) -> str:
    """The message, without what GradwireError adds when it is printed."""
    if isinstance(error, NotSerializable) and not isinstance(error, RemoteError) and error.place:
        return f"{error.place}: {error.message}"
    if isinstance(error, GradwireError):
        return error.message
    if isinstance(error, KeyError) and len(error.args) == 1:
        return str(error.args[0])  # str(KeyError("x")) is the repr of its message
    return str(error)


def empty_instance(kind: type[T], message: object, members: Sequence[BaseException]) -> T:
    """An empty instance, made by the `__new__` of the nearest base in C: no user code runs.

    Only a group needs its message and members; the type and number of these are checked in C.
    """
    if issubclass(kind, BaseExceptionGroup):
        return cast(T, BaseExceptionGroup.__new__(kind, cast(str, message), members))
    for base in kind.__mro__:
        if not base.__flags__ & _IS_HEAP_TYPE:
            try:
                error = cast(Any, base).__new__(kind)
            except TypeError:  # another base determines the layout
                continue
            BaseException.__init__(error)
            return cast(T, error)
    raise TypeError(f"no base in C can create a {kind.__name__}")


@cache
def _maybe_remote_type(original: type[BaseException] | None) -> type[RemoteError] | None:
    """A subclass of RemoteError and `original`; None if the two cannot be combined."""
    if original is None or not issubclass(original, Exception):
        return None
    if issubclass(original, RemoteError):
        return original
    name = f"Remote{original.__name__}"
    try:
        remote = type(name, (RemoteError, original), {"__module__": __name__})
    except TypeError:  # their layouts conflict
        return None
    # A property of the original with the name of a RemoteError attribute would run its code.
    found = [data.found_on(original, name) for name in data.OURS - {"args"}]
    is_taken = any(hasattr(type(each), "__set__") for each in found)
    return None if is_taken and not issubclass(original, BaseExceptionGroup) else remote
