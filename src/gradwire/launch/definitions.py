"""The functions and classes that a program sends by value to the workers that it has started.

What can be imported is called by its name, as ever. What `__main__` defines, lambdas, closures,
partials and methods of objects are pickled at each call, so a worker runs them as they are here at
that moment; they are sent if the workers do not have exactly this pickle. received.py is the
workers' side, and definitions_state.py decides who gets what.
"""

from __future__ import annotations

import hashlib
import importlib.util
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, final
from weakref import WeakKeyDictionary

import msgspec
from torch import is_grad_enabled, nn

from gradwire.agent.messages import Failure
from gradwire.errors import DeadlinePassed, GradwireError, PeerLost, UsageError
from gradwire.ids import WorkerId
from gradwire.launch.definitions_state import Definition, DefinitionsState
from gradwire.launch.received import Define, Undefine, definition_file, refusal_file
from gradwire.rpc.codec.pickle_codec import WithCode, dumps_with_code
from gradwire.rpc.expose.names import (
    VERSION,
    Function,
    described,
    is_of_main,
    label,
    name_of,
    unversioned,
)
from gradwire.rpc.graph_cut import warn_of_cut
from gradwire.rpc.worker import Worker
from gradwire.threads import check_may_wait

_MOST_KEPT = 128
_OTHERS_SECONDS = 5.0
"""how long a call waits for workers other than the one that it goes to"""
_LOOK_AGAIN_SECONDS = 0.1
"""before a worker that had no room for a message is told again"""
_MAIN = "__main__:"

_encode = msgspec.msgpack.Encoder().encode


@final
class Definitions:
    """What one program has sent to its workers."""

    def __init__(
        self,
        worker: Worker,
        directory: Path,
        ranks: Iterable[int],
        tell: Callable[[int, bytes], bool],
    ) -> None:
        self._worker, self._directory, self._tell = worker, directory, tell
        self._names = {rank: worker.directory.name(rank) for rank in ranks}
        self._state, self._changed = DefinitionsState(self._names), threading.Condition()
        self._stale: dict[int, list[str]] = {rank: [] for rank in self._names}
        """what the workers are to forget"""
        self._reasons: dict[tuple[int, int], str] = {}
        """why a worker could not load a definition, by its rank and the number"""
        self._lost: dict[int, PeerLost] = {}
        self._slow: set[int] = set()
        """workers that did not load the last one in time: calls to others do not wait for them"""
        self._classes: WeakKeyDictionary[type, Definition] = WeakKeyDictionary()

    def name_to_call(self, func: Function, to: WorkerId, deadline: float) -> str:
        """The name by which a worker finds the function, which is sent there if need be."""
        if to in self._lost:
            lost = self._lost[to]
            raise PeerLost(lost.message, hint=lost.hint).about(self._names[to], phase="call")
        name = _maybe_importable(func)
        if name is not None:
            return name
        definition = self._defined(func, f"{_spoken(func)} for {self._name(to)}", to)
        self._await(definition, to, deadline - self._worker.agent.clock.now())
        return definition.name

    def name_of(self, target: Any) -> str:  # noqa: ANN401  (a function or a class)
        """The name of a function or class in a value, which all workers know.

        A class is sent when it is first met: a value may hold a thousand objects of it.
        """
        name = _maybe_importable(target)
        if name is not None:
            return name
        known = self._classes.get(target) if isinstance(target, type) else None
        if known is None or not self._state.holds(known):
            known = self._defined(target, f"{_spoken(target)} in a value", None)
            if isinstance(target, type):
                self._classes[target] = known
        self._await(known, None, self._worker.options.timeouts.call)
        return label(target) if is_of_main(target) else known.name

    def _name(self, to: WorkerId) -> str:
        return self._worker.directory.name(to)

    def _defined(self, func: Function, what: str, to: WorkerId | None) -> Definition:
        packed = _packed(func, what)
        if packed.copies and is_grad_enabled():
            warn_of_cut(0, what, packed.copies, to=to)
        digest = hashlib.sha256(packed.data).digest()
        with self._changed:
            known = self._state.maybe_find(digest)
            if known is not None:
                return known
            number = self._state.next_number()
        definition_file(self._directory, number).write_bytes(packed.data)
        name = f"{_plain_name(func)}{VERSION}{secrets.token_hex(8)}"
        self._worker.registry.give(name, func)  # for calls to this worker itself
        with self._changed:
            known = self._state.maybe_find(digest)  # another thread may have been faster
            made = known or self._state.add(number, name, digest)
            if not self._worker.agent.in_flight:  # else a call may need an old one
                self._forget()
        return made

    def _forget(self) -> None:
        for old in self._state.forget_all_but(_MOST_KEPT):
            self._worker.registry.take_back(old.name)
            definition_file(self._directory, old.number).unlink(missing_ok=True)
            for rank in old.told:
                self._stale[rank].append(old.name)

    def _await(self, definition: Definition, to: WorkerId | None, seconds: float) -> None:
        """Wait until the workers have it: this one until the deadline, the others not so long."""
        targets = self._names.keys() if to is None else self._names.keys() & {to}
        late = time.monotonic() + seconds
        enough = min(late, time.monotonic() + _OTHERS_SECONDS)
        with self._changed:
            for rank in targets:
                definition.again(rank)
            while missing := self._state.missing(definition) - (self._slow - targets):
                check_may_wait("sending a function")
                self._tell_all()
                left = (late if missing & targets else enough) - time.monotonic()
                if left <= 0:
                    self._slow |= missing
                    break
                self._changed.wait(min(left, _LOOK_AGAIN_SECONDS))
            self._raise_refusal(definition, definition.refused & targets)
        if missing & targets:
            who = ", ".join(sorted(self._names[rank] for rank in missing & targets))
            raise DeadlinePassed(
                f"{who} did not load {_display(definition)} in time",
                hint="it may be frozen, or what is loaded may import much; a longer timeout waits "
                "longer",
            )

    def _tell_all(self) -> None:
        for rank, names in self._stale.items():
            some = names[:_MOST_KEPT]
            if some and self._tell(rank, _encode(Undefine(some))):
                del names[: len(some)]
        for rank, each in self._state.to_tell():
            if self._tell(rank, _encode(Define(each.number, each.name, each.digest))):
                each.told.add(rank)

    def _raise_refusal(self, definition: Definition, by: Iterable[int]) -> None:
        for rank in by:
            why = self._reasons[rank, definition.number]
            raise UsageError(
                f"{self._names[rank]} cannot load {_display(definition)}: {why}",
                hint="the modules that it uses must be importable there",
            )

    # -- what the workers do; called by the thread that supervises them

    def has(self, rank: int, number: int) -> None:
        """A worker has loaded a definition."""
        with self._changed:
            self._state.has(rank, number)
            self._slow.discard(rank)
            self._changed.notify_all()

    def refused(self, rank: int, number: int) -> None:
        """A worker could not load it."""
        place, why = refusal_file(self._directory, self._names[rank], number), "it does not say why"
        with suppress(OSError, msgspec.DecodeError):
            why = msgspec.msgpack.decode(place.read_bytes(), type=Failure).text
            place.unlink()
        with self._changed:
            self._reasons[rank, number] = why
            self._state.refused(rank, number)
            self._changed.notify_all()

    def restarted(self, rank: int) -> None:
        """A worker has died, and its next incarnation will have nothing."""
        with self._changed:
            self._state.restarted(rank)

    def joined(self, rank: int) -> None:
        """It has joined: it gets what the others have."""
        with self._changed:
            self._tell_all()

    def lost(self, rank: int, error: PeerLost) -> None:
        """A worker is lost for good."""
        with self._changed:
            self._lost[rank] = error
            self._state.gone(rank)
            self._changed.notify_all()


def _maybe_importable(func: Any) -> str | None:  # noqa: ANN401
    """The name of what is imported here and there; None for what is sent by value."""
    match func:
        case FunctionType() | type():
            is_sent = _is_of_program(func)
        case partial():
            is_sent = not isinstance(func.func, nn.Module)
        case MethodType():
            owner = func.__self__
            is_sent = not isinstance(owner, type) or _is_of_program(owner)
        case nn.Module():  # no copy of it is to be called: a hint says what to do
            is_sent = False
        case _:
            is_sent = _is_of_program(type(func))
    name = None if is_sent else name_of(func)
    return None if name is None or name.startswith(_MAIN) else name


def _is_of_program(target: Any) -> bool:  # noqa: ANN401
    """Whether a function or class is defined by `__main__`, or inside of a function."""
    name = target.__qualname__
    is_local = "<lambda>" in name or "<locals>" in name
    return is_local or target.__module__ == "__main__"


def _plain_name(func: Any) -> str:  # noqa: ANN401
    """What errors and profiles show; not all of it leads somewhere."""
    if isinstance(func, partial):
        return _plain_name(func.func)
    if isinstance(func, MethodType):
        owner: Any = func.__self__
        return f"{label(owner if isinstance(owner, type) else type(owner))}.{func.__name__}"
    return label(func if hasattr(func, "__qualname__") else type(func))


def _display(definition: Definition) -> str:
    return unversioned(definition.name).replace(":", ".")


def _spoken(func: Function) -> str:
    return _plain_name(func).replace(":", ".")


def _packed(func: Function, what: str) -> WithCode:
    if importlib.util.find_spec("cloudpickle") is None:
        raise UsageError(
            f"{what} is defined where workers cannot import it: to send it, gradwire needs the "
            "library cloudpickle",
            hint="pip install 'gradwire[interactive]'; or put it into a module, and pass "
            "expose=[module]",
        )
    try:
        return dumps_with_code(func)
    except Exception as error:  # __reduce__ may raise anything
        why = error.message if isinstance(error, GradwireError) else str(error)
        raise UsageError(
            f"{what} ({described(func)}) cannot be sent: {type(error).__name__}: {why}",
            hint="references and other things of this process that it uses go into args",
        ) from error
