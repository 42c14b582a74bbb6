"""An exception as data, and back.

It travels as the name of its type, its text and its traceback. Only the types that the receiver
already knows (builtins, ours, exposed ones) are looked up again; nothing is imported for a peer.
"""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import msgspec

from gradwire.agent.messages import Failure
from gradwire.errors import CannotTravel, GradwireError, RemoteError

_log = logging.getLogger("gradwire")
_MOST_TEXT = 1 << 20
_MOST_TRACEBACK = 1 << 14
"""characters of what all workers that an exception has passed say of it. The first part is of the
last worker; the end, which is longer, of the one that raised it.
"""

TypeOf = Callable[[str], type[BaseException] | None]
NameOf = Callable[[type[BaseException]], str]


def describe(error: BaseException, worker: str, name_of: NameOf) -> Failure:
    """What the caller must know of an exception raised on `worker`.

    An exception that came from further away keeps the worker where it was raised; the traceback of
    each worker it passed is added on the way.
    """
    story = _safe(lambda: "".join(traceback.format_exception(error)), _MOST_TRACEBACK)
    if not isinstance(error, GradwireError):
        return Failure(name_of(type(error)), _safe(lambda: _text(error)), None, story, worker)
    about = (error.peer, error.link, error.phase)
    if isinstance(error, RemoteError):
        return Failure(error.type_name, error.message, error.hint, story, error.worker, *about)
    text = _safe(lambda: _text(error))
    return Failure(name_of(type(error)), text, error.hint, story, worker, *about)


def clipped(failure: Failure, most: int) -> Failure:
    """The same with the end of its traceback and the beginning of its text, to fit a limit."""
    return msgspec.structs.replace(
        failure, text=failure.text[:most], traceback=failure.traceback[-most:], hint=None
    )


def revive(failure: Failure, type_of: TypeOf) -> RemoteError:
    """What to raise here: a RemoteError that is also of the original type where we know it.

    An exposed type may have ideas of its own about how it is made; then it is a plain RemoteError.
    """
    original = type_of(failure.type_name)
    if original is not None:
        try:
            error = _blank(original)
            if error is not None:
                return _filled(error, failure)
        except Exception:
            _log.debug("%s could not be made again", failure.type_name, exc_info=True)
    return _filled(RemoteError.__new__(RemoteError), failure)


def _filled(error: RemoteError, failure: Failure) -> RemoteError:
    error.args = (failure.text,)
    error.message = failure.text
    error.hint = failure.hint
    error.worker = failure.worker
    error.peer, error.link, error.phase = failure.peer, failure.link, failure.phase
    error.type_name = failure.type_name
    error.remote_traceback = failure.traceback
    return error


def fresh(error: BaseException) -> BaseException:
    """A copy to raise: the one we keep must not gather the frames of all who wait for it."""
    try:
        again = copy.copy(error)
    except Exception:  # its constructor wants more than it kept
        return error
    if type(again) is not type(error):
        return error
    again.__cause__, again.__context__ = error.__cause__, error.__context__
    return again.with_traceback(error.__traceback__)


def _safe(text: Callable[[], str], most: int = _MOST_TEXT) -> str:
    """A text that can travel, whatever the exception makes of the attempt to print it."""
    try:
        said = text()
    except Exception as failed:
        return f"(it cannot be printed: {type(failed).__name__})"
    if len(said) > most:
        said = f"{said[: most // 4]}\n…\n{said[-(most - most // 4) :]}"
    return said.encode("utf-8", "backslashreplace").decode()


def _text(error: BaseException) -> str:
    """The message without what our own types add when printed."""
    if isinstance(error, CannotTravel):
        return f"{error.place}: {error.message}" if error.place else error.message
    if isinstance(error, GradwireError):
        return error.message
    if isinstance(error, KeyError) and len(error.args) == 1:
        return str(error.args[0])  # str(KeyError("x")) is the repr of its message
    return str(error)


def _blank(original: type[BaseException]) -> RemoteError | None:
    """An instance made without the original's constructor, whose arguments we do not have."""
    if not issubclass(original, Exception):
        return None
    try:
        remote = _remote_type(original)  # type: ignore[arg-type]  # classes are hashable
    except TypeError:  # two layouts that do not mix
        return None
    for base in remote.__mro__:  # the first of them that knows how an instance is laid out
        try:
            error = cast(RemoteError, cast(Any, base).__new__(remote))
        except TypeError:
            continue
        BaseException.__init__(error)
        return error
    return None


@cache
def _remote_type(original: type[Exception]) -> type[RemoteError]:
    if issubclass(original, RemoteError):
        return original
    return type(f"Remote{original.__name__}", (RemoteError, original), {"__module__": __name__})
