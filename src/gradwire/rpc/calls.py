"""A call, on the worker that makes it: pack, send, wait. The other end is serving.py.

See docs/design.md, section 3, for the stairs it walks down here and up there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, final

import msgspec
import torch
from msgspec.structs import replace

from gradwire.agent.agent import Agent, Answer, Outcome
from gradwire.agent.failure import fresh
from gradwire.agent.promise import Promise
from gradwire.autograd.engine import Engine
from gradwire.autograd.graph import lift_this_thread
from gradwire.autograd.profiling import NOTHING
from gradwire.autograd.scope import current_context
from gradwire.autograd.torch_private import is_profiled
from gradwire.errors import BadMessage
from gradwire.ids import CallId, ContextId, WorkerId
from gradwire.rpc.futures import INTERRUPTED, Future, Landing, Surroundings
from gradwire.rpc.graph_cut import warn_of_cut
from gradwire.rpc.holds_state import Hold
from gradwire.rpc.manner import Manner, Translated
from gradwire.rpc.messages import BackwardFrom, Call, Fetch, Kept, Result
from gradwire.rpc.parcels import Packed, Parcels, Unpacked, cut_tensors
from gradwire.rpc.profiling import call_span, fetch_span
from gradwire.rpc.refs import Refs
from gradwire.rpc.scope import current_errand
from gradwire.rpc.window import Window
from gradwire.wire.message import Message


class Target(msgspec.Struct, frozen=True):
    """What to run and its arguments. See Note [How a call names its function], messages.py."""

    name: str
    args: tuple[object, ...]
    kwargs: dict[str, object]

    @property
    def spoken(self) -> str:
        """Its name in errors and warnings."""
        return self.name.replace(":", ".").lstrip(".!")


class Created(NamedTuple):
    """A reference to a value that is being made, and the answer to the call that makes it."""

    hold: Hold
    answer: Promise[Outcome]


@final
class Calls:
    """The calls of one worker."""

    def __init__(
        self,
        agent: Agent,
        engine: Engine,
        refs: Refs,
        parcels: Parcels,
        manner: Manner,
        *,
        in_flight: int,
    ) -> None:
        self._agent, self._engine, self._refs = agent, engine, refs
        self._parcels, self._manner = parcels, manner
        self._window = Window(in_flight, agent.clock)
        self._around = Surroundings(agent, self._depth_of, manner.of_callback)
        agent.kinds.add(Result)
        agent.on_late(Result, self._late)

    # -- the worker that calls

    def call(self, to: WorkerId, target: Target, deadline: float) -> Any:  # noqa: ANN401
        """Run it there and return what it returned, or raise what it raised."""
        if is_profiled():
            with self._span("sync", target, to):
                return self._call(to, target, deadline)
        return self._call(to, target, deadline)

    def _call(self, to: WorkerId, target: Target, deadline: float) -> Any:  # noqa: ANN401
        context = self._engine.calling(current_context(), to)
        promise = self._send_call(to, target, context, deadline)
        return self._answer(to, promise, context, target)

    def call_async(self, to: WorkerId, target: Target, deadline: float) -> Future[Any]:
        """Run it there; a future of what it returns."""
        with self._span("async", target, to):
            context = self._engine.calling(current_context(), to)
            promise = self._send_call(to, target, context, deadline)
            landed = self._landed(promise, to, context, target.spoken, self._manner.of_call)
        return Future(landed, self._around, to, partial(self._agent.cancel, promise))

    def _span(self, kind: str, target: Target, to: WorkerId) -> AbstractContextManager[Any]:
        if not is_profiled():
            return NOTHING
        directory = self._agent.directory
        return call_span(kind, target.name, directory.me.name, directory.name(to))

    def failed(self, error: Exception) -> Future[Any]:
        """The future of a call that did not leave."""
        landed: Promise[Landing[Any]] = Promise()
        landed.settle(Landing(error=error))
        return Future(landed, self._around)

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
                promise = self._send_call(to, target, context, deadline, keep)
        except BaseException:
            self._refs.creation_undone(hold)
            raise
        if hold.fork is not None:
            promise.on_settled(partial(self._refs.creation_ended, hold.fork))
        return Created(hold, promise)

    def fetch(self, hold: Hold, deadline: float) -> Any:  # noqa: ANN401
        """A copy of a value that lives elsewhere."""
        directory = self._agent.directory
        with fetch_span(directory.me.name, directory.name(hold.owner)):
            return self._fetch(hold, deadline)

    def _fetch(self, hold: Hold, deadline: float) -> Any:  # noqa: ANN401
        self._refs.wait_until_counted(hold, deadline)
        context = self._engine.calling(current_context(), hold.owner)
        seconds = deadline - self._agent.clock.now()
        message = Fetch(hold.ref, context, seconds)
        what = f"fetch of {hold.ref}"
        promise = self._ask(hold.owner, message, deadline, what, _phase(context))
        self._engine.called(context, hold.owner)
        landed = self._landed(promise, hold.owner, context, what, self._manner.of_fetch)
        return self._wait_for(hold.owner, promise, landed)

    def _ask(
        self, owner: WorkerId, message: Message, deadline: float, what: str, phase: str
    ) -> Promise[Outcome]:
        return self._agent.request(
            owner,
            message,
            deadline=deadline,
            what=what,
            phase=phase,
            errand=current_errand(),
            tells=not self._manner.runs_what_is_late,
        )[1]

    def backward_from(
        self, hold: Hold, context: ContextId, *, retain_graph: bool, deadline: float
    ) -> None:
        """Run `backward(context, [value])` where the value lives."""
        self._refs.wait_until_counted(hold, deadline)
        self._engine.calling(self._engine.contexts.find(context).id, hold.owner)
        message = BackwardFrom(hold.ref, context, retain_graph, deadline - self._agent.clock.now())
        what = f"backward from {hold.ref}"
        promise = self._ask(hold.owner, message, deadline, what, "backward")
        try:
            self._agent.wait(hold.owner, lambda: promise.settled, promise.wait)
            outcome = promise.wait()
        except BaseException:
            self._agent.cancel(promise, INTERRUPTED)
            raise
        if isinstance(outcome, Exception):
            raise fresh(self._manner.of_call(outcome, self._agent.directory))

    def _answer(
        self, peer: WorkerId, promise: Promise[Outcome], context: ContextId | None, target: Target
    ) -> Any:  # noqa: ANN401
        """Wait for it on this thread, which goes on with it: no future is needed."""
        differentiable = torch.is_grad_enabled()
        try:
            self._agent.wait(peer, lambda: promise.settled, promise.wait)
            outcome = promise.wait()
        except BaseException:  # interrupted: what comes must still be let go of
            self._agent.cancel(promise, INTERRUPTED)
            late = self._landed(promise, peer, context, target.spoken, self._manner.of_call)
            late.on_settled(self._let_go)
            raise
        if isinstance(outcome, Exception):
            raise fresh(self._manner.of_call(outcome, self._agent.directory))
        came = self._opened(outcome, peer, context)
        lift_this_thread(came.depth)
        if came.cut and differentiable:
            warn_of_cut(came.cut, f"the result of {target.spoken}")
        return came.value

    def _send_call(
        self,
        to: WorkerId,
        target: Target,
        context: ContextId | None,
        deadline: float,
        keep: Kept | None = None,
    ) -> Promise[Outcome]:
        packed = self._parcels.pack(
            (target.args, target.kwargs),
            to=to,
            context=context,
            place=("args", "kwargs"),
            deadline=deadline,
        )
        try:
            parcel = packed.parcel
            if parcel.tensors and torch.is_grad_enabled():
                cut = cut_tensors(parcel.tensors, parcel.crossings)
                if cut:
                    warn_of_cut(len(cut), f"the arguments of {target.spoken}")
            call, promise = self._request(to, target, packed, deadline, keep)
        except BaseException:
            self._parcels.undo(packed)
            raise
        self._engine.called(context, to)
        if self._agent.events.are_heard:
            self._agent.events.emit("call", call, self._agent.directory.name(to))
        return promise

    def _request(
        self, to: WorkerId, target: Target, packed: Packed, deadline: float, keep: Kept | None
    ) -> tuple[CallId, Promise[Outcome]]:
        size, what = packed.size, target.spoken
        if self._agent.dispatch.user.runs_this_thread:
            self._window.pass_by(to, size)
        else:
            self._window.enter(to, size, deadline, what)
        try:
            message = self._message(target, packed, deadline, keep)
            call, promise = self._agent.request(
                to,
                message,
                packed.payload,
                deadline=deadline,
                what=what,
                phase=_phase(packed.context),
                errand=current_errand(),
                tells=keep is None and not self._manner.runs_what_is_late,
            )
        except BaseException:
            self._window.leave(to, size)
            raise
        promise.on_settled(lambda _: self._window.leave(to, size))
        return call, promise

    def _message(self, target: Target, packed: Packed, deadline: float, keep: Kept | None) -> Call:
        return Call(
            target.name,
            packed.parcel,
            packed.context,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            deadline - self._agent.clock.now(),
            keep,
        )

    def _landed(
        self,
        promise: Promise[Outcome],
        source: WorkerId,
        context: ContextId | None,
        what: str,
        translated: Translated,
    ) -> Promise[Landing[Any]]:
        """The answer when it comes, not yet unpacked: that is for the thread that wants it."""
        landed: Promise[Landing[Any]] = Promise()
        differentiable = torch.is_grad_enabled()

        def settle(outcome: Outcome) -> None:
            if isinstance(outcome, Exception):
                landed.settle(Landing(error=translated(outcome, self._agent.directory)))
                return

            def unpack() -> Unpacked:
                came = self._opened(outcome, source, context)
                return came if differentiable else replace(came, cut=0)

            landed.settle(Landing(unpack, what=f"the result of {what}"))

        promise.on_settled(settle)
        return landed

    def _opened(self, answer: Answer, peer: WorkerId, context: ContextId | None) -> Unpacked:
        result = answer.message
        if not isinstance(result, Result):
            raise BadMessage(f"a call was answered by {type(result).__name__}")
        if result.accepted:
            self._refs.accepting.heard(result.accepted, peer)
        return self._parcels.unpack(result.parcel, answer.payload, source=peer, context=context)

    def _wait_for(
        self, peer: WorkerId, promise: Promise[Outcome], landed: Promise[Landing[Any]]
    ) -> Any:  # noqa: ANN401
        try:
            self._agent.wait(peer, lambda: landed.settled, landed.wait)
            landing = landed.wait()
        except BaseException:  # interrupted: what comes must still be let go of
            self._agent.cancel(promise, INTERRUPTED)
            landed.on_settled(self._let_go)
            raise
        return landing.value()

    def _let_go(self, late: Landing[Any]) -> None:
        self._agent.dispatch.service.submit(late.unpacked)

    def _late(self, peer: WorkerId, message: Message) -> None:
        assert isinstance(message, Result)
        self._refs.accepting.heard(message.accepted, peer)
        self._refs.release(message.parcel.references)


def _phase(context: ContextId | None) -> str:
    return "call" if context is None else "forward"
