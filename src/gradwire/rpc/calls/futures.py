"""Future, which `rpc_async` returns, and the pending result behind it.

It subclasses torch's Future, so that `torch.futures.wait_all` and `collect_all` accept it. Waiting,
callbacks and errors are implemented here: exceptions keep their types, callbacks run on the
worker's thread pool in the context of the call (never on a thread that reads a channel), and it can
be awaited.
"""

from __future__ import annotations

import logging
import math
import traceback
import weakref
from _thread import RLock  # threading.RLock is a Python function around it
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, cast, final

import torch
from msgspec.structs import replace

from gradwire.agent.agent import Agent
from gradwire.agent.remote_errors import fresh
from gradwire.agent.requests.promise import Promise
from gradwire.autograd.graph.walk import lift_this_thread
from gradwire.autograd.scope import saving_here
from gradwire.current import get_current
from gradwire.errors import ArgumentTypeError, Cancelled, RemoteError, UsageError, WaitTimeout
from gradwire.ids import WorkerId
from gradwire.rpc.calls.completions import Completions
from gradwire.rpc.calls.in_loop import settled_in_loop
from gradwire.rpc.codec.body import DecodedBody
from gradwire.rpc.codec.tensors_of import depth_of
from gradwire.rpc.graph_cut import warn_of_cut
from gradwire.rpc.recompute.checkpoint_run import CheckpointRun
from gradwire.rpc.recompute.left_open import end_left_open, opened

T = TypeVar("T")
S = TypeVar("S")

_log = logging.getLogger("gradwire")

_Native = torch._C.Future
"""The C++ base class of torch.futures.Future."""

ResultOrError = DecodedBody | BaseException
"""A decoded result, or the exception in its place."""


def _being_unpacked(_: object) -> DecodedBody:
    raise AssertionError("a marker, never called")


@final
class PendingResult(Generic[T]):
    """The outcome of a promise, unpacked once, by the first thread that asks for it.

    `unpack` may return another PendingResult, whose result is then the result of this one; see
    `Future.follow`.
    """

    __slots__ = ("__weakref__", "_lock", "_result", "_unpack", "promise", "unseen", "what")

    def __init__(
        self,
        promise: Promise[Any],
        unpack: Callable[[Any], ResultOrError | PendingResult[T]] = lambda outcome: outcome,
        what: Callable[[], str] = lambda: "a call",
    ) -> None:
        self.promise = promise
        self.what = what
        """its name in the log and in warnings; computed only when needed"""
        self.unseen: list[traceback.TracebackException] | None = None
        """the exception of a callback, until it is retrieved; see `Future._note_unseen`"""
        self._unpack: Callable[[Any], ResultOrError | PendingResult[T]] | None = unpack
        self._lock = RLock()
        self._result: ResultOrError | PendingResult[T]

    def pass_through(self, opened: Callable[[Any], Any]) -> None:
        """Make another value of the one that comes, before anybody can ask for it."""
        unpack = self._unpack
        assert unpack is not None, "it is new"

        def both(outcome: object) -> ResultOrError | PendingResult[T]:
            result = unpack(outcome)
            if type(result) is not DecodedBody:
                return result
            return replace(result, value=opened(result.value))

        self._unpack = both

    def unpacked(self) -> T | BaseException:
        """Wait for the promise; return the value, or the exception in its place."""
        if self._unpack is not None:
            self._unpack_once()
        result = self._result
        if type(result) is DecodedBody:
            return result.value  # type: ignore[no-any-return]
        return result.unpacked() if isinstance(result, PendingResult) else result  # type: ignore[return-value]

    def error(self) -> BaseException | None:
        """The exception in place of the value; None if there is a value."""
        if self._unpack is not None:
            self._unpack_once()
        result = self._result
        if isinstance(result, PendingResult):
            return result.error()
        if type(result) is DecodedBody:
            return None
        if self.unseen is not None:
            self.unseen.clear()
        return fresh(result)  # type: ignore[arg-type]

    def state(self) -> str:
        """How its promise has ended, in a word; nothing is unpacked for it."""
        if not self.promise.settled:
            return "pending"
        outcome = self.promise.outcome if self._unpack is not None else self._result
        if isinstance(outcome, PendingResult):
            return outcome.state()
        if isinstance(outcome, Cancelled) and not isinstance(outcome, RemoteError):
            return "cancelled"
        return "failed" if isinstance(outcome, BaseException) else "done"

    def _unpack_once(self) -> None:
        outcome = self.promise.wait()
        with self._lock:
            unpack = self._unpack
            if unpack is None:
                return
            if unpack is _being_unpacked:
                raise UsageError(
                    f"{self.what()} was waited for by a finalizer or a signal handler "
                    "that interrupted the thread which unpacks it",
                    hint="wait for it elsewhere",
                )
            self._unpack = _being_unpacked
            try:
                self._result = unpack(outcome)
            except BaseException as error:  # kept, and raised by each wait
                if not isinstance(error, Exception) and not getattr(outcome, "is_taken", True):
                    self._unpack = unpack  # a signal handler has raised before it began
                    raise
                # Without its frames: they hold the future, which holds this through C++, where
                # the garbage collector cannot see the cycle.
                self._result = error.with_traceback(None)
            self._unpack = None  # last: a thread that reads None reads the result without the lock

    def value(self, _: object = None) -> T:
        """Return the value, or raise its exception, on the thread that uses it.

        That thread must create its nodes above the depth of the value; see Note [The order of
        waiting], autograd/graph/walk.py. Warnings name a line of that thread.
        """
        if self._unpack is not None:
            self._unpack_once()
        result = self._result
        if type(result) is not DecodedBody:
            if isinstance(result, PendingResult):
                return result.value()
            if self.unseen is not None:
                self.unseen.clear()
            raise fresh(result)  # type: ignore[arg-type]
        if result.depth:
            lift_this_thread(result.depth)
        if result.handoff is not None:
            result.handoff()
        if result.cut or result.copies:
            self._result = replace(result, cut=0, copies=0)
            what = f"the result of {self.what()}"
            warn_of_cut(result.cut, what, result.copies, source=result.source)
        return result.value  # type: ignore[no-any-return]


class Environment(NamedTuple):
    """What the futures of one worker need from it."""

    agent: Agent
    completions: Completions
    on_death: Callable[[object, Callable[[], None]], None]
    """run a callback on a thread of the worker when an object has died"""
    of_callback: Callable[[Exception], Exception] = lambda error: error


class Future(torch.futures.Future[T]):
    """A value on its way from another worker."""

    def __init__(
        self,
        pending: PendingResult[T],
        environment: Environment,
        callee: WorkerId | None = None,
        parts: Sequence[Future[Any]] = (),
    ) -> None:
        _Native.__init__(self, [])
        promise = pending.promise
        self._pending, self._promise = pending, promise
        self._parts = parts
        """the futures of the calls that this one is the future of, if these are several"""
        self._environment, self._callee = environment, callee
        self._scope = copy_context()
        self._grad_enabled = torch.is_grad_enabled()
        # Waits in C++ (wait_all, collect_all) call this and raise what it raises. It must not
        # hold the future: that cycle goes through C++ and would never be freed.
        self._set_unwrap_func(pending.value)
        self._is_waited_for = False
        self._is_completing = False
        promise.on_settled(self._on_settled)

    def wait(self, timeout: float | None = None) -> T:
        """Block until it is done; return the value, or raise the exception in its place.

        WaitTimeout after `timeout` seconds; the call goes on, and may be waited for again. Without
        one, the deadline of the call ends the wait.
        """
        self._wait(timeout)
        return self._pending.value()

    def result(self, timeout: float | None = None) -> T:
        """As `wait`: the name that the futures of `concurrent.futures` have for it."""
        return self.wait(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `wait` does; return the exception in place of the value, None if there is none.

        As in `concurrent.futures`, Cancelled is raised.
        """
        self._wait(timeout)
        error = self._pending.error()
        if error is not None and self._pending.state() == "cancelled":
            raise error
        return error

    def _wait(self, timeout: float | None) -> None:
        run, until = get_current()[3], math.inf
        if timeout is not None:
            until = self._environment.agent.clock.now() + checked_seconds(timeout)
        try:
            if run is None:
                self._await(until)
            else:
                with cast(CheckpointRun, run).waiting():  # waits are numbered: also when done
                    self._await(until)
            self._complete()
        except WaitTimeout:  # the callback of __init__ is still there, unless it has run by now
            self._is_waited_for = False
            if self._promise.settled:
                self._environment.completions.add(self._complete)
            raise
        except BaseException:  # interrupted
            self._is_waited_for = False
            self._promise.on_settled(self._on_settled)
            raise

    def _await(self, until: float) -> None:
        promise = self._promise
        if not promise.settled:
            self._is_waited_for = True
            for part in self._parts:  # these read the channels
                part._await(until)
            agent, callee = self._environment.agent, self._callee
            peer = agent.directory.me.id if callee is None else callee
            if until == math.inf:
                agent.wait_for(peer, promise)
            elif not settles(agent, peer, promise, until):
                hint = "it goes on: wait again, or cancel() it"
                raise WaitTimeout(f"the time to wait for {self!r} is over", hint=hint)

    def cancel(self) -> bool:
        """Cancel the call. False if it is done already, or if this is the future of a callback.

        Waiting for it then raises Cancelled. The worker that runs the call is told: a function that
        has not begun will not run, and a running one gets Cancelled at its next use of gradwire.
        Dropping the future does not cancel the call, nor does cancelling a task that awaits it.
        """
        if self._callee is None:
            return True in [part.cancel() for part in self._parts]
        return self._environment.agent.cancel(self._promise, "its future was cancelled")

    def cancelled(self) -> bool:
        """Whether it was cancelled before it was done."""
        return self._pending.state() == "cancelled"

    def __repr__(self) -> str:
        state, agent = self._pending.state(), self._environment.agent
        opened = agent.since(self._promise)
        age = "" if opened is None else f" for {agent.clock.now() - opened:.3g} s"
        return f"<gradwire.Future: {self._pending.what()}, {state}{age}>"

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

        `wait` raises what the callback raised. If nobody waits, it is logged.
        """
        return self._following(callback, follows=False)

    def follow(self, callback: Callable[[Future[T]], Future[S]]) -> Future[S]:
        """Like `then`, for a callback that returns a future: a future of the result of that one."""
        return self._following(callback, follows=True)

    def _following(self, callback: Callable[[Future[T]], Any], *, follows: bool) -> Future[Any]:
        _check_callable(callback)
        following: Promise[ResultOrError | PendingResult[Any]] = Promise()
        pending: PendingResult[Any] = PendingResult(following, what=partial(str, self._callback_of))
        future: Future[Any] = Future(pending, self._environment)
        followed = weakref.ref(pending)
        del pending  # the callback must not keep it alive: its death is what logs an unseen error

        def run() -> None:
            try:
                outcome: ResultOrError = self._in_scope(callback)
            except BaseException as error:
                self._note_unseen(followed(), error)
                outcome = self._translated(error)
            inner = outcome.value if isinstance(outcome, DecodedBody) else None
            if follows and isinstance(inner, Future):
                awaited = inner._pending
                inner._promise.on_settled(lambda _: following.settle(awaited))
            else:
                following.settle(outcome)

        self._promise.on_settled(lambda _: self._submit(run))
        return future

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        """Call `callback(this)` when it is done. Its exceptions are logged."""
        _check_callable(callback)

        def run() -> None:
            try:
                self._in_scope(callback)
            except BaseException:  # no future to raise it from
                _log.exception("%s raised", self._callback_of)

        self._promise.on_settled(lambda _: self._submit(run))

    def set_result(self, result: T) -> NoReturn:
        """Refuse: the answer to the call completes the future."""
        raise UsageError(
            "Future can only be marked completed once",
            hint="a torch.futures.Future() of your own may be completed by hand",
        )

    def set_exception(self, result: T) -> NoReturn:
        """Refuse, as `set_result`."""
        self.set_result(result)

    def __await__(self) -> Generator[Any, None, T]:
        yield from settled_in_loop(self._promise)
        return self.wait()

    def _in_scope(self, callback: Callable[[Future[T]], S]) -> DecodedBody:
        """Run a callback with the worker, context and grad mode of the call."""

        def run() -> DecodedBody:
            with saving_here():
                value = callback(self)
                return DecodedBody(value, depth_of(value))

        before = len(opened.checkpoints)  # this may run in another thread, if the pool is closed
        try:
            with torch.set_grad_enabled(self._grad_enabled):
                return self._scope.copy().run(run)
        finally:
            end_left_open(before)

    def _translated(self, error: BaseException) -> BaseException:
        if not isinstance(error, Exception):
            return error.with_traceback(None)
        translated = self._environment.of_callback(error)
        if translated is not error:
            translated.__cause__, translated.__context__ = error.__cause__, error
        return translated.with_traceback(None)

    @property
    def _callback_of(self) -> str:
        me = self._environment.agent.directory.me.name
        return f"{me}: a callback of the future of {self._pending.what()}"

    def _note_unseen(self, pending: PendingResult[Any] | None, error: BaseException) -> None:
        """Log the exception if nobody has retrieved it when its future dies, as asyncio does."""
        if pending is not None:
            # Summarized at once: the frames of a traceback hold the future, which would never die.
            summary = traceback.TracebackException.from_exception(error, lookup_lines=False)
            pending.unseen = [summary]
            report = partial(_report, self._callback_of, pending.unseen)
            self._environment.on_death(pending, report)

    def _on_settled(self, _: object) -> None:
        """Complete the C++ future, unless a waiting thread will.

        Not on this thread, which reads a channel: completion runs the callbacks that torch has
        registered, which may block.
        """
        agent, is_call = self._environment.agent, self._callee is not None
        if is_call and (record := agent.events.record) is not None:
            record("answered", agent.clock.now(), self._promise.request, self._callee)
        if not self._is_waited_for:
            self._environment.completions.add(self._complete)

    def _submit(self, job: Callable[[], object]) -> None:
        self._environment.agent.dispatch.service.submit_or_run(job)

    def _complete(self) -> None:
        if not self._is_completing:
            self._is_completing = True
            try:
                # Exceptions are set as results, too: the unwrap function raises them.
                _Native.set_result(self, self._pending.unpacked())
            except BaseException as error:  # interrupted: `wait` lets another thread do it
                self._is_completing = is_done = _Native.done(self)
                if not (is_done and isinstance(error, RuntimeError)):  # else another was first
                    raise


class Behind(NamedTuple):
    """What code that waits for several futures needs of one."""

    promise: Promise[Any]
    agent: Agent
    callee: WorkerId | None
    """the worker that runs the call; None for the future of a callback"""
    has_failed: Callable[[], bool]


def behind(future: Future[Any]) -> Behind:
    """See Behind."""
    pending, agent = future._pending, future._environment.agent
    return Behind(future._promise, agent, future._callee, lambda: pending.state() == "failed")


def settles(agent: Agent, peer: WorkerId | None, promise: Promise[Any], until: float) -> bool:
    """Wait for a promise that messages of this peer settle, no longer than this; whether it is."""
    now = agent.clock.now
    if not promise.settled and now() < until:
        with suppress(TimeoutError):
            agent.wait(
                peer,
                lambda: promise.settled or now() >= until,
                lambda: promise.wait(until - now()),
            )
    return promise.settled


def checked_seconds(timeout: object) -> float:
    """The seconds of a wait for a future: none to look once, unlike those of a call."""
    try:
        seconds = float(timeout)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if math.isnan(seconds):
        raise ArgumentTypeError(
            f"timeout={timeout!r:.80} is not a number of seconds",
            hint="timeout=None waits until the deadline of the call",
        )
    return seconds


def _report(callback_of: str, unseen: list[traceback.TracebackException]) -> None:
    for summary in unseen:
        text = "".join(summary.format()).rstrip()
        _log.error("%s raised, and nobody has asked for its result\n%s", callback_of, text)


def _check_callable(callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"then(): incompatible function arguments: {callback!r} is not callable")
