"""What `rpc_async` returns.

A torch Future, so that `torch.futures.wait_all` and `collect_all` take it; but waiting, callbacks
and errors are ours: exceptions keep their types, callbacks run on a thread of the worker's pool in
the context of the call (never on one that reads), and it can be awaited.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import traceback
import weakref
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, cast, final

import torch
from msgspec.structs import replace

from gradwire.agent.agent import Agent
from gradwire.agent.remote_errors import fresh
from gradwire.agent.requests.promise import Promise
from gradwire.agent.serving.dispatch import Dispatch
from gradwire.autograd.graph.walk import lift_this_thread
from gradwire.autograd.scope import current_context, inside
from gradwire.current import get_current
from gradwire.errors import UsageError
from gradwire.ids import WorkerId
from gradwire.rpc.codec.body import Unpacked
from gradwire.rpc.graph_cut import warn_of_cut
from gradwire.rpc.recompute.session import Session

INTERRUPTED = "the thread that waited for it was interrupted"
T = TypeVar("T")
S = TypeVar("S")

_log = logging.getLogger("gradwire")

_Native = torch._C.Future
"""what torch's own futures pass on to"""

Opened = Unpacked | BaseException
"""What came: a value, or the exception in its place."""


def as_it_is(opened: Opened) -> Opened:
    """What needs no unpacking."""
    return opened


def _being_opened(_: object) -> Unpacked:
    raise AssertionError("it stands for what unpacks a future, while that is at work")


@final
class Unseen:
    """What a callback raised, until somebody asks the future of its result.

    If nobody does, it is logged once that future is gone, as asyncio does: else it would be lost.
    The traceback is kept as text: its frames hold the future, which would never be gone.
    """

    __slots__ = ("_callback_of", "_story", "is_seen")

    def __init__(self, callback_of: str, error: BaseException) -> None:
        self._callback_of = callback_of
        self._story = traceback.TracebackException.from_exception(error, lookup_lines=False)
        self.is_seen = False

    def report(self) -> None:
        """The future is gone."""
        if not self.is_seen:
            story = "".join(self._story.format()).rstrip()
            told = "%s raised, and nobody has asked for its result\n%s"
            _log.error(told, self._callback_of, story)


@final
class PendingResult(Generic[T]):
    """What a promise brings, unpacked once, by whichever thread asks first.

    What `unpack` makes of it may also be another landing: that of a future that is followed.
    """

    __slots__ = ("__weakref__", "_came", "_lock", "_unpack", "promise", "unseen", "what")

    def __init__(
        self,
        promise: Promise[Any],
        unpack: Callable[[Any], Opened | PendingResult[T]] = as_it_is,
        what: Callable[[], str] = lambda: "a call",
    ) -> None:
        self.promise = promise
        self.what = what
        """how the log and warnings call it; asked when they do"""
        self.unseen: Unseen | None = None
        self._unpack: Callable[[Any], Opened | PendingResult[T]] | None = unpack
        self._lock = threading.RLock()
        self._came: Opened | PendingResult[T]

    def unpacked(self) -> T | BaseException:
        """The value, or the exception that came in its place. Waits for the promise."""
        if self._unpack is not None:
            self._open()
        came = self._came
        if type(came) is Unpacked:
            return came.value  # type: ignore[no-any-return]
        return came.unpacked() if isinstance(came, PendingResult) else came  # type: ignore[return-value]

    def _open(self) -> None:
        outcome = self.promise.wait()
        with self._lock:
            unpack = self._unpack
            if unpack is None:
                return
            if unpack is _being_opened:
                raise UsageError(
                    f"{self.what()} was waited for by a finalizer or a signal handler "
                    "which has interrupted the thread that unpacks it",
                    hint="wait for it elsewhere",
                )
            self._unpack = _being_opened
            try:
                self._came = unpack(outcome)
            except BaseException as error:  # kept, and raised wherever it is waited for
                # Without its frames: they hold the future, which holds this through C++.
                self._came = error.with_traceback(None)
            self._unpack = None  # at last: who finds none takes what came, without the lock

    def value(self, _asked_by: object = None) -> T:
        """The value, or its exception raised, for the thread that goes on with it.

        See Note [The order of waiting], autograd/graph/walk.py: that thread must make its nodes
        above the depth the value came from. It is also the one whose line a warning names.
        """
        if self._unpack is not None:
            self._open()
        came = self._came
        if type(came) is not Unpacked:
            if isinstance(came, PendingResult):
                return came.value()
            if self.unseen is not None:
                self.unseen.is_seen = True
            raise fresh(came)  # type: ignore[arg-type]
        if came.depth:
            lift_this_thread(came.depth)
        if came.cut or came.copies:
            self._came = replace(came, cut=0, copies=0)
            warn_of_cut(came.cut, f"the result of {self.what()}", came.copies)
        return came.value  # type: ignore[no-any-return]


class Environment(NamedTuple):
    """What the futures of one worker need of it."""

    agent: Agent
    depth_of: Callable[[object], int]
    on_death: Callable[[object, Callable[[], None]], None]
    """call back, on a thread of the worker's own, when an object has died"""
    of_callback: Callable[[Exception], Exception] = lambda error: error


class Future(torch.futures.Future[T]):
    """A value on its way from another worker."""

    def __init__(
        self,
        landing: PendingResult[T],
        around: Environment,
        source: WorkerId | None = None,
        cancel: Callable[[str], bool] = lambda _: False,
    ) -> None:
        _Native.__init__(self, [])
        self._cancel = cancel
        self._landing, self._promise = landing, landing.promise
        self._around = around
        self._source = around.agent.directory.me.id if source is None else source
        self._scope = contextvars.copy_context()
        self._grad_enabled = torch.is_grad_enabled()
        # What waits in C++ (wait_all, collect_all) asks this too, and raises what it raises.
        # It must not hold the future: that cycle goes through C++ and would never be freed.
        self._set_unwrap_func(landing.value)
        self._is_waited_for = False
        self._completion = threading.Lock()
        landing.promise.on_settled(self._landed)

    def wait(self) -> T:
        """Block until the value is here, and return it or raise what came instead."""
        session = get_current()[3]
        if session is None:
            self._await()
        else:
            with cast(Session, session).waiting():  # also if it is there: these waits are counted
                self._await()
        self._complete()
        return self._landing.value()

    def _await(self) -> None:
        promise = self._promise
        if not promise.settled:
            self._is_waited_for = True
            try:
                self._around.agent.wait(self._source, lambda: promise.settled, promise.wait)
            except BaseException:  # interrupted
                self._is_waited_for = False
                promise.on_settled(self._landed)
                raise

    def cancel(self) -> bool:
        """Call it off; False if it is done already, or is no call but what follows one.

        Whoever waits for it gets Cancelled. The worker that runs it hears of it: a function that
        has not begun does not, and one that runs gets Cancelled at its next use of gradwire.
        To let go of a future does not call it off, nor to cancel a task that awaits it.
        """
        return self._cancel("its future was cancelled")

    def value(self) -> T:
        """The value of a future that is done."""
        if not self.done():
            raise UsageError("the future is not done", hint="wait() blocks until it is")
        return self.wait()

    def done(self) -> bool:
        """Whether wait() returns at once."""
        return self._promise.settled

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """A future of what `callback(this)` returns, called when this one is done.

        What it raises is raised by `wait`, and logged if nobody has asked for it.
        """
        _check_callable(callback)
        following: Promise[Opened] = Promise()
        landing: PendingResult[S] = PendingResult(following, what=partial(str, self._callback_of))
        future: Future[S] = Future(landing, self._around)
        note = partial(self._note_unseen, weakref.ref(landing))
        del landing  # what runs must not keep alive what is logged when it dies

        def run() -> None:
            following.settle(self._brought_by(callback, note))

        self._promise.on_settled(lambda _: self._pools.service.submit_or_run(run))
        return future

    def follow(self, callback: Callable[[Future[T]], Future[S]]) -> Future[S]:
        """Like `then` for a callback that returns a future: a future of what that one brings."""
        _check_callable(callback)
        following: Promise[Opened | PendingResult[S]] = Promise()
        landing: PendingResult[S] = PendingResult(
            following, lambda came: came, partial(str, self._callback_of)
        )
        future: Future[S] = Future(landing, self._around)
        note = partial(self._note_unseen, weakref.ref(landing))
        del landing

        def pass_on(landed: PendingResult[S]) -> None:
            following.settle(landed)

        def run() -> None:
            came = self._brought_by(callback, note)
            inner = came.value if isinstance(came, Unpacked) else came
            if isinstance(inner, Future):
                landed = inner._landing
                inner._promise.on_settled(lambda _: pass_on(landed))
            else:
                following.settle(inner)

        self._promise.on_settled(lambda _: self._pools.service.submit_or_run(run))
        return future

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        """Call `callback(this)` when it is done. What it raises is logged."""
        _check_callable(callback)

        def run() -> None:
            try:
                self._in_scope(callback)
            except BaseException:  # there is nobody to raise it for
                _log.exception("%s raised", self._callback_of)

        self._promise.on_settled(lambda _: self._pools.service.submit_or_run(run))

    def set_result(self, result: T) -> NoReturn:
        """It is the call that completes it."""
        raise UsageError(
            "Future can only be marked completed once",
            hint="a torch.futures.Future() of your own may be completed by hand",
        )

    def set_exception(self, result: T) -> NoReturn:
        """It is the call that completes it."""
        self.set_result(result)

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def tell() -> None:
            if not done.done():
                done.set_result(None)

        def settled(_: object) -> None:
            with suppress(RuntimeError):  # the loop was closed: nobody awaits any more
                loop.call_soon_threadsafe(tell)

        self._promise.on_settled(settled)
        yield from done
        return self.wait()

    def _in_scope(self, callback: Callable[[Future[T]], S]) -> Unpacked:
        """Run a callback where the call was made: its worker, its context, its grad mode."""

        def run() -> Unpacked:
            with inside(current_context()):
                value = callback(self)
                return Unpacked(value, self._around.depth_of(value))

        with torch.set_grad_enabled(self._grad_enabled):
            return self._scope.copy().run(run)

    def _brought_by(
        self, callback: Callable[[Future[T]], S], note: Callable[[BaseException], None]
    ) -> Opened:
        """What a callback returned, or what it raised, for whoever waits for that."""
        try:
            return self._in_scope(callback)
        except BaseException as error:
            note(error)
            if not isinstance(error, Exception):
                return error.with_traceback(None)
            told = self._around.of_callback(error)
            if told is not error:
                told.__cause__, told.__context__ = error.__cause__, error
            return told.with_traceback(None)

    @property
    def _callback_of(self) -> str:
        me = self._around.agent.directory.me.name
        return f"{me}: a callback of the future of {self._landing.what()}"

    def _note_unseen(self, landing: weakref.ref[PendingResult[S]], error: BaseException) -> None:
        unseen, alive = Unseen(self._callback_of, error), landing()
        if alive is not None:
            alive.unseen = unseen
            self._around.on_death(alive, unseen.report)

    @property
    def _pools(self) -> Dispatch:
        return self._around.agent.dispatch

    def _landed(self, _: object) -> None:
        """Let C++ know, off the thread that reads: torch runs callbacks of its own then.

        Whoever waits for it does that, without waking another thread.
        """
        if not self._is_waited_for:
            self._pools.service.submit_or_run(self._complete)

    def _complete(self) -> None:
        if self._completion.acquire(blocking=False):
            # An exception too: the unwrap function raises it.
            _Native.set_result(self, self._landing.unpacked())


def _check_callable(callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"then(): incompatible function arguments: {callback!r} is not callable")
