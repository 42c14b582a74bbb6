"""Objects between a process and those it started, as pickles.

Never anything from a peer: what is unpickled here was written by the process that started this one,
or by one that this one started, through a pipe of theirs or a directory that only their user may
enter. Workers among themselves do not pickle.

Plain pickle, not multiprocessing's: that one moves tensors to shared memory behind the sender's
back, and they cannot be read any more once the sender is gone. Here all is a copy. Modules go by
their names.
"""

from __future__ import annotations

from typing import Any

from gradwire.errors import UsageError
from gradwire.rpc.codec.pickle_codec import dumps, loads
from gradwire.rpc.expose.names import maybe_at, steps


def packed(value: object, what: str, *, hint: str | None = None) -> bytes:
    """The object as bytes; `what` names it should it not be possible."""
    try:
        return dumps(value)
    except Exception as error:  # reducing runs the object's own code, which may raise anything
        raise UsageError(f"{what} cannot be pickled: {error}", hint=hint) from error


def unpacked(data: bytes, what: str, *, hint: str | None = None) -> Any:  # noqa: ANN401
    """The object that these bytes stand for; `what` names it should it not be possible."""
    try:
        return loads(data)
    except Exception as error:
        raise UsageError(f"{what} cannot be unpickled here: {error}", hint=hint) from error


def maybe_exception(name: str) -> type[BaseException] | None:
    """The exception type that a process of ours names, in whichever module of ours it is."""
    found = maybe_at(steps(name))
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
