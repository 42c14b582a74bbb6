"""A call, on the worker that makes it: pack, send, wait. The other end is server.py.

See docs/design.md, section 3, for the stairs it walks down here and up there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast, final

import msgspec
import torch
from msgspec.structs import replace

from gradwire.agent.agent import Agent, Answer, Outcome
from gradwire.agent.peers.directory import Directory
from gradwire.agent.remote_errors import fresh
from gradwire.agent.requests.deadlines import OUTERMOST, Cut, extent_of
from gradwire.agent.requests.promise import Promise
from gradwire.agent.serving.window import Window
from gradwire.autograd.anomaly import OFF, current_mode
from gradwire.autograd.call_profiling import call_span, fetch_span
from gradwire.autograd.engine import Engine
from gradwire.autograd.graph.walk import lift_this_thread
from gradwire.autograd.profiling import NOTHING
from gradwire.autograd.scope import current_context
from gradwire.current import current_inbound, get_current
from gradwire.errors import BadMessage
from gradwire.ids import CallId, ContextId, WorkerId
from gradwire.rpc.behavior import Behavior, Translated
from gradwire.rpc.calls.futures import INTERRUPTED, Environment, Future, Opened, PendingResult
from gradwire.rpc.codec.body import Bodies, Packed, Unpacked, cut_tensors
from gradwire.rpc.graph_cut import warn_of_cut
from gradwire.rpc.messages import BackwardFrom, Call, Fetch, Kept, Made, Result
from gradwire.rpc.recompute.session import Asked, Session, waiting
from gradwire.rpc.refs.handles_state import RefHandle
from gradwire.rpc.refs.refs import Refs
from gradwire.torch_private import is_profiled
from gradwire.wire.message import Message


class Target(msgspec.Struct, frozen=True):
    """What to run and its arguments. See Note [How a call names its function], rpc/messages.py."""

    name: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    what: str = ""
    """how errors and warnings call it, where its own name says little"""


@lru_cache(1 << 10)
def spoken(name: str) -> str:
    """The name of a function of ours in errors and warnings."""
    return name.replace(":", ".").lstrip(".!")


def spoken_on(directory: Directory, to: WorkerId, name: str) -> str:
    """The name of a function, and of the worker that runs it."""
    return f"{spoken(name)} on {directory.name(to)}"


class Sent(msgspec.Struct, frozen=True):
    """A call on its way, and how much of the window it takes."""

    call: CallId
    promise: Promise[Outcome]
    size: int
    asked: Asked | None
    """if it is made for a checkpoint"""


class Created(NamedTuple):
    """A reference to a value that is being made, and the answer to the call that makes it."""

    hold: RefHandle
    answer: Promise[Outcome]


@final
class Calls:
    """The calls of one worker."""

    def __init__(
        self,
        agent: Agent,
        engine: Engine,
        refs: Refs,
        bodies: Bodies,
        behavior: Behavior,
        *,
        in_flight: int,
    ) -> None:
        self._agent, self._engine, self._refs = agent, engine, refs
        self._bodies, self._behavior = bodies, behavior
        self._carries_modes = behavior.carries_modes
        self._window = Window(in_flight, agent.clock)
        agent.sections.add(self._window.lock)
        self._around = Environment(agent, self._depth_of, refs.on_death, behavior.of_callback)
        agent.kinds.add(Result)
        agent.kinds.add(Made)
        agent.on_late(Result, self._late)

    # -- the worker that calls

    def call(self, to: WorkerId, target: Target, deadline: float) -> Any:  # noqa: ANN401
        """Run it there and return what it returned, or raise what it raised."""
        if is_profiled():
            with self._span("sync", target, to):
                return self._call(to, target, deadline)
        return self._call(to, target, deadline)

    def _call(self, to: WorkerId, target: Target, deadline: float) -> Any:  # noqa: ANN401
        """Wait for it on this thread, which goes on with it: no future is needed."""
        context = current_context()
        if context is not None:
            context = self._engine.calling(context, to)
        sent = self._send_call(to, target, context, deadline)
        try:
            if context is not None or self._agent.events.are_heard:
                self._left(sent, to, context)
            if sent.asked is None:
                outcome = self._outcome(sent.promise, to, context)
            else:
                with sent.asked.session.waiting():
                    outcome = self._outcome(sent.promise, to, context)
        finally:
            self._window.leave(to, sent.size)
        if isinstance(outcome, Exception):
            raise fresh(self._behavior.of_call(outcome, self._agent.directory))
        recorded = self._carries_modes or torch.is_grad_enabled()
        came = self._opened(outcome, to, context, recorded)
        if came.depth:
            lift_this_thread(came.depth)
        if (came.cut or came.copies) and torch.is_grad_enabled():
            what = spoken_on(self._agent.directory, to, target.what or target.name)
            warn_of_cut(came.cut, f"the result of {what}", came.copies)
        return came.value

    def _outcome(
        self, promise: Promise[Outcome], peer: WorkerId, context: ContextId | None
    ) -> Outcome:
        try:
            self._agent.wait(peer, lambda: promise.settled, promise.wait)
            return promise.wait()
        except BaseException:  # interrupted: what comes must still be let go of
            self._agent.cancel(promise, INTERRUPTED)
            self._let_go(self._landing(promise, peer, context, str, self._behavior.of_call))
            raise

    def call_async(self, to: WorkerId, target: Target, deadline: float) -> Future[Any]:
        """Run it there; a future of what it returns."""
        if is_profiled():
            with self._span("async", target, to):
                return self._call_async(to, target, deadline)
        return self._call_async(to, target, deadline)

    def _call_async(self, to: WorkerId, target: Target, deadline: float) -> Future[Any]:
        context = current_context()
        if context is not None:
            context = self._engine.calling(context, to)
        promise = self._send_unawaited(to, target, context, deadline)
        what = partial(spoken_on, self._agent.directory, to, target.what or target.name)
        landing = self._landing(promise, to, context, what, self._behavior.of_call)
        return Future(landing, self._around, to, partial(self._agent.cancel, promise))

    def _span(self, kind: str, target: Target, to: WorkerId) -> AbstractContextManager[Any]:
        if not is_profiled():
            return NOTHING
        directory = self._agent.directory
        return call_span(kind, target.name, directory.me.name, directory.name(to))

    def failed(self, error: Exception) -> Future[Any]:
        """The future of a call that did not leave."""
        promise: Promise[Opened] = Promise()
        promise.settle(error)
        return Future(PendingResult(promise), self._around)

    def _depth_of(self, value: object) -> int:
        return self._engine.depth_of(current_context(), value)

    def stand_above(self, value: object) -> None:
        """This thread goes on with a value of its own worker that another thread may have made."""
        lift_this_thread(self._depth_of(value))

    def remote(self, to: WorkerId, target: Target, deadline: float) -> Created:
        """Run it there and keep what it returns there."""
        here = to == self._agent.directory.me.id
        hold = self._refs.keep_here() if here else self._refs.keep_elsewhere(to)
        try:
            context = self._engine.calling(current_context(), to)
            keep = Kept(hold.ref, hold.fork)
            with self._span("remote", target, to):
                promise = self._send_unawaited(to, target, context, deadline, keep)
        except BaseException:
            self._refs.creation_undone(hold)
            raise
        if hold.fork is not None:
            promise.on_settled(partial(self._refs.creation_ended, hold.fork))
        return Created(hold, promise)

    def fetch(self, hold: RefHandle, deadline: float) -> Any:  # noqa: ANN401
        """A copy of a value that lives elsewhere."""
        directory = self._agent.directory
        with fetch_span(directory.me.name, directory.name(hold.owner)):
            with waiting():  # for a checkpoint's call to be answered, too: it is when made
                landing = self._fetched(hold, deadline)
            return landing.value()

    def _fetched(self, hold: RefHandle, deadline: float) -> PendingResult[Any]:
        self._refs.wait_until_counted(hold, deadline)
        context = self._engine.calling(current_context(), hold.owner)
        message = Fetch(hold.ref, context, deadline - self._agent.clock.now())
        what, phase = f"fetch of {hold.ref}", "call" if context is None else "forward"
        promise = self._ask(hold.owner, message, deadline, what, phase)
        self._engine.called(context, hold.owner)
        spoken_of = partial(spoken_on, self._agent.directory, hold.owner, what)
        landing = self._landing(promise, hold.owner, context, spoken_of, self._behavior.of_fetch)
        return self._waited_for(hold.owner, landing)

    def _ask(
        self, owner: WorkerId, message: Message, deadline: float, what: str, phase: str
    ) -> Promise[Outcome]:
        return self._agent.request(
            owner,
            message,
            deadline=deadline,
            what=what,
            phase=phase,
            inbound=current_inbound(),
            tells=not self._behavior.runs_what_is_late,
        )[1]

    def backward_from(
        self, hold: RefHandle, context: ContextId, *, retain_graph: bool, deadline: float
    ) -> None:
        """Run `backward(context, [value])` where the value lives."""
        self._refs.wait_until_counted(hold, deadline)
        self._engine.calling(self._engine.contexts.find(context).id, hold.owner)
        seconds = deadline - self._agent.clock.now()
        message = BackwardFrom(hold.ref, context, retain_graph, seconds, current_mode())
        what = f"backward from {hold.ref}"
        promise = self._ask(hold.owner, message, deadline, what, "backward")
        try:
            self._agent.wait(hold.owner, lambda: promise.settled, promise.wait)
            outcome = promise.wait()
        except BaseException:
            self._agent.cancel(promise, INTERRUPTED)
            raise
        if isinstance(outcome, Exception):
            raise fresh(self._behavior.of_call(outcome, self._agent.directory))

    def _send_unawaited(
        self,
        to: WorkerId,
        target: Target,
        context: ContextId | None,
        deadline: float,
        keep: Kept | None = None,
    ) -> Promise[Outcome]:
        """Send a call that this thread does not wait for."""
        sent = self._send_call(to, target, context, deadline, keep)
        sent.promise.on_settled(partial(self._window.leave, to, sent.size))
        if context is not None or self._agent.events.are_heard:
            self._left(sent, to, context)
        return sent.promise

    def _send_call(
        self,
        to: WorkerId,
        target: Target,
        context: ContextId | None,
        deadline: float,
        keep: Kept | None = None,
    ) -> Sent:
        """When its answer has come, it has to leave the window."""
        _, _, inbound, session = get_current()
        asked = None if session is None else cast(Session, session).calling((to, target.name))
        draws = None if asked is None else asked.draws
        value, place = (target.args, target.kwargs), ("args", "kwargs")
        packed = self._bodies.pack(value, to=to, context=context, place=place, deadline=deadline)
        body, size, counted = packed.body, packed.size, False
        what = target.what or spoken(target.name)
        try:
            grad = torch.is_grad_enabled()
            if grad and (body.tensors or packed.copies):
                self._warn_if_cut(packed, what, to)
            counted = self._window.maybe_enter(to, size) or self._wait(to, size, deadline, what)
            carries = self._carries_modes
            inference = carries and torch.is_inference_mode_enabled()
            anomaly = current_mode() if torch.is_anomaly_enabled() else OFF
            extent = extent_of(deadline) if type(deadline) is Cut else OUTERMOST
            more = (deadline - self._agent.clock.now(), keep, draws, anomaly, *extent)
            call, promise = self._agent.request(
                to,
                Call(target.name, body, context, grad or not carries, inference, *more),
                packed.payload,
                deadline=deadline,
                what=what,
                phase="call" if context is None else "forward",
                inbound=inbound,
                tells=keep is None and not self._behavior.runs_what_is_late,
            )
        except BaseException:
            self._not_sent(to, size if counted else 0, packed, asked)
            raise
        answer = None if asked is None else asked.sent(promise, self._agent)
        return Sent(call, promise, size, answer)

    def _warn_if_cut(self, packed: Packed, what: str, to: WorkerId) -> None:
        cut = cut_tensors(packed.body.tensors, packed.body.crossings)
        if cut or packed.copies:
            callee = self._agent.directory.name(to)
            warn_of_cut(len(cut), f"the arguments of {what} on {callee}", packed.copies)

    def _not_sent(self, to: WorkerId, size: int, packed: Packed, asked: Asked | None) -> None:
        """A call that was packed did not leave; `size` is what it takes of the window so far."""
        if size:
            self._window.leave(to, size)
        self._bodies.undo(packed)
        if asked is not None:
            asked.place.failed()

    def _wait(self, to: WorkerId, size: int, deadline: float, what: str) -> bool:
        """Until there is room for so much; a function of a peer's does not wait for it."""
        if self._agent.dispatch.user.runs_this_thread:
            self._window.pass_by(to, size)
        else:
            self._window.enter(to, size, deadline, what)
        return True

    def _left(self, sent: Sent, to: WorkerId, context: ContextId | None) -> None:
        self._engine.called(context, to)
        if self._agent.events.are_heard:
            self._agent.events.emit("call", sent.call, self._agent.directory.name(to))

    def _landing(
        self,
        promise: Promise[Outcome],
        source: WorkerId,
        context: ContextId | None,
        what: Callable[[], str],
        translated: Translated,
    ) -> PendingResult[Any]:
        """The answer when it comes, to be unpacked by the thread that wants it."""
        differentiable = torch.is_grad_enabled()
        opened = partial(self._landed, source, context, differentiable, translated)
        return PendingResult(promise, opened, what)

    def _landed(
        self,
        source: WorkerId,
        context: ContextId | None,
        differentiable: bool,
        translated: Translated,
        outcome: Outcome,
    ) -> Opened:
        if isinstance(outcome, Exception):
            return translated(outcome, self._agent.directory)
        came = self._opened(outcome, source, context, self._carries_modes or differentiable)
        if (came.cut or came.copies) and not differentiable:
            return replace(came, cut=0, copies=0)
        return came

    def _opened(
        self, answer: Answer, peer: WorkerId, context: ContextId | None, recorded: bool
    ) -> Unpacked:
        result = answer.message
        if not isinstance(result, Result):
            raise BadMessage(f"a call was answered by {type(result).__name__}")
        if result.accepted:
            self._refs.accepting.heard(result.accepted, peer)
        came = self._bodies.unpack(
            result.body, answer.payload, source=peer, context=context, is_recorded=recorded
        )
        return replace(came, copies=result.copies) if result.copies > 0 else came

    def _waited_for(self, peer: WorkerId, landing: PendingResult[Any]) -> PendingResult[Any]:
        promise = landing.promise
        try:
            self._agent.wait(peer, lambda: promise.settled, promise.wait)
            promise.wait()
            return landing
        except BaseException:  # interrupted: what comes must still be let go of
            self._agent.cancel(promise, INTERRUPTED)
            self._let_go(landing)
            raise

    def _let_go(self, late: PendingResult[Any]) -> None:
        late.promise.on_settled(lambda _: self._agent.dispatch.service.submit(late.unpacked))

    def _late(self, peer: WorkerId, message: Message) -> None:
        assert isinstance(message, Result)
        self._refs.accepting.heard(message.accepted, peer)
        self._refs.release(message.body.references)
