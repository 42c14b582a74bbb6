"""A call, both ends of it: the worker that makes it, and the one that runs the function.

    call     pack, send, wait                  remote   pack, send, do not wait
    _serve   unpack, run, pack, answer         _keep    unpack, run, keep what it returns

See docs/design.md, section 3, for the stairs it walks down here and up there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import torch

from gradwire.agent.agent import Agent, Answer, Outcome
from gradwire.agent.dispatch import Lane, Payload, Source
from gradwire.agent.failure import fresh
from gradwire.agent.messages import Done
from gradwire.agent.promise import Promise
from gradwire.autograd.api import check_root
from gradwire.autograd.engine import Engine
from gradwire.autograd.graph import lift_this_thread
from gradwire.autograd.scope import current_context
from gradwire.errors import BadMessage, UsageError
from gradwire.ids import CallId, ContextId, WorkerId
from gradwire.rpc.futures import Future, Landing
from gradwire.rpc.graph_cut import warn_of_cut
from gradwire.rpc.messages import BackwardFrom, Call, Fetch, Kept, Parcel, Result
from gradwire.rpc.parcels import Packed, Parcels, Unpacked, cut_tensors
from gradwire.rpc.profiling import call_span, fetch_span, function_span
from gradwire.rpc.refs import Content, Raised, Refs, Value
from gradwire.rpc.refs_state import Hold
from gradwire.rpc.registry import Registry
from gradwire.wire.message import Message

Inside = Callable[[ContextId | None, float], AbstractContextManager[None]]
"""The scope of a served function: this worker, its context, its deadline."""


class Target(NamedTuple):
    """What to run: a function's travelling name, or a dot and a method's, and its arguments."""

    name: str
    args: tuple[object, ...]
    kwargs: dict[str, object]

    @property
    def spoken(self) -> str:
        """Its name in errors and warnings."""
        return self.name.replace(":", ".").lstrip(".")


@final
class Calls:
    """The calls of one worker."""

    def __init__(
        self,
        agent: Agent,
        engine: Engine,
        refs: Refs,
        parcels: Parcels,
        registry: Registry,
        inside: Inside,
    ) -> None:
        self._agent, self._engine, self._refs = agent, engine, refs
        self._parcels, self._registry, self._inside = parcels, registry, inside
        agent.handle(Call, self._serve, Lane.USER)
        agent.handle(Fetch, self._serve_fetch, Lane.USER)
        agent.handle(BackwardFrom, self._serve_backward, Lane.USER)
        agent.kinds.add(Result)
        agent.on_late(Result, self._late)

    # -- the worker that calls

    def call(self, to: WorkerId, target: Target, deadline: float) -> Any:  # noqa: ANN401
        """Run it there and return what it returned, or raise what it raised."""
        with self._span("sync", target, to):
            return self._wait_for(self._launch(to, target, deadline))

    def call_async(self, to: WorkerId, target: Target, deadline: float) -> Future[Any]:
        """Run it there; a future of what it returns."""
        with self._span("async", target, to):
            landed = self._launch(to, target, deadline)
        return Future(landed, self._agent.dispatch, self._depth_of)

    def _span(self, kind: str, target: Target, to: WorkerId) -> AbstractContextManager[Any]:
        directory = self._agent.directory
        return call_span(kind, target.name, directory.me.name, directory.name(to))

    def _depth_of(self, value: object) -> int:
        return self._engine.depth_of(current_context(), value)

    def stand_above(self, value: object) -> None:
        """This thread goes on with a value of its own worker that another thread may have made."""
        lift_this_thread(self._depth_of(value))

    def remote(self, to: WorkerId, target: Target, deadline: float) -> Hold:
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
        return hold

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
        _, promise = self._agent.request(hold.owner, message, deadline=deadline, what=what)
        self._engine.called(context, hold.owner)
        return self._wait_for(self._landed(promise, hold.owner, context, what))

    def backward_from(
        self, hold: Hold, context: ContextId, *, retain_graph: bool, deadline: float
    ) -> None:
        """Run `backward(context, [value])` where the value lives."""
        self._engine.calling(self._engine.contexts.find(context).id, hold.owner)
        message = BackwardFrom(hold.ref, context, retain_graph, deadline - self._agent.clock.now())
        what = f"backward from {hold.ref}"
        _, promise = self._agent.request(hold.owner, message, deadline=deadline, what=what)
        with self._agent.dispatch.user.waiting():
            outcome = promise.wait()
        if isinstance(outcome, Exception):
            raise fresh(outcome)

    def _launch(self, to: WorkerId, target: Target, deadline: float) -> Promise[Landing[Any]]:
        context = self._engine.calling(current_context(), to)
        promise = self._send_call(to, target, context, deadline)
        return self._landed(promise, to, context, target.spoken)

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
            if torch.is_grad_enabled() and (
                cut := cut_tensors(packed.parcel.tensors, packed.parcel.crossings)
            ):
                warn_of_cut(cut, f"the arguments of {target.spoken}")
            call, promise = self._agent.request(
                to,
                self._message(target, packed, deadline, keep),
                packed.payload,
                deadline=deadline,
                what=target.spoken,
            )
        except BaseException:
            self._parcels.undo(packed)
            raise
        self._engine.called(context, to)
        self._agent.events.emit("call", call, self._agent.directory.name(to))
        return promise

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
        self, promise: Promise[Outcome], source: WorkerId, context: ContextId | None, what: str
    ) -> Promise[Landing[Any]]:
        """The answer when it comes, not yet unpacked: that is for the thread that wants it."""
        landed: Promise[Landing[Any]] = Promise()
        differentiable = torch.is_grad_enabled()

        def settle(outcome: Outcome) -> None:
            if isinstance(outcome, Exception):
                landed.settle(Landing(error=outcome))
                return

            def unpack() -> Unpacked:
                parcel, payload = _parcel_of(outcome)
                came = self._parcels.unpack(parcel, payload, source=source, context=context)
                return came if differentiable else came._replace(cut=0)

            landed.settle(Landing(unpack, what=f"the result of {what}"))

        promise.on_settled(settle)
        return landed

    def _wait_for(self, landed: Promise[Landing[Any]]) -> Any:  # noqa: ANN401
        try:
            with self._agent.dispatch.user.waiting():
                landing = landed.wait()
        except BaseException:  # interrupted: what comes must still be let go of
            landed.on_settled(self._let_go)
            raise
        return landing.value()

    def _let_go(self, late: Landing[Any]) -> None:
        self._agent.dispatch.service.submit(late.unpacked)

    def _late(self, message: Message) -> None:
        assert isinstance(message, Result)
        self._refs.release(message.parcel.references)

    # -- the worker that is called

    def _serve(self, call: Call, payload: Payload, source: Source) -> None:
        deadline = self._agent.clock.now() + call.seconds
        if call.keep is not None:
            self._keep(call, call.keep, payload, source, deadline)
            return
        value = self._run(call, payload, source, deadline)
        self._answer_value(source, value, call.context, deadline)

    def _keep(
        self, call: Call, keep: Kept, payload: Payload, source: Source, deadline: float
    ) -> None:
        promise = self._refs.creation_arrived(keep.ref, keep.fork)
        content: Content
        try:
            self._agent.answer(source, Done(), deadline=deadline)
            content = Value(self._run(call, payload, source, deadline))
        except BaseException as error:  # whoever fetches the value is told
            content = Raised(self._agent.describe(error))
        promise.settle(content)

    def _run(self, call: Call, payload: Payload, source: Source, deadline: float) -> object:
        if call.context is not None:
            self._engine.contexts.heard_of(call.context)
        with self._inside(call.context, deadline), _modes(call.grad_enabled, call.inference):
            unpacked = self._parcels.unpack(
                call.parcel, payload, source=source.worker, context=call.context
            )
            function, args, kwargs = self._function(call.function, unpacked.value, deadline)
            with function_span(call.function):
                return function(*args, **kwargs)

    def _function(
        self, name: str, arguments: object, deadline: float
    ) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
        match arguments:
            case (tuple() as args, dict() as kwargs):
                pass
            case _:
                raise BadMessage("a call came without arguments")
        if not name.startswith("."):
            return self._registry.lookup(name), args, kwargs
        hold = getattr(args[0], "hold", None) if args else None
        if not isinstance(hold, Hold):
            raise BadMessage(f"the method {name[1:]} was called on no reference")
        value = self._refs.value_here(hold, deadline)
        return self._registry.method(value, name[1:]), args[1:], kwargs

    def _answer_value(
        self, source: Source, value: object, context: ContextId | None, deadline: float
    ) -> None:
        packed = self._parcels.pack(
            value, to=source.worker, context=context, place="result", deadline=deadline
        )
        call = CallId(source.worker, source.request)
        self._agent.events.emit("answer", call, self._agent.directory.name(source.worker))
        left = False
        try:
            left = self._agent.answer(
                source, Result(packed.parcel), packed.payload, deadline=deadline
            )
        finally:
            if not left:
                self._parcels.undo(packed)

    def _serve_fetch(self, fetch: Fetch, _: Payload, source: Source) -> None:
        deadline = self._agent.clock.now() + fetch.seconds

        def answer(content: Content) -> None:
            if isinstance(content, Raised):
                self._agent.answer(source, content.failure, deadline=deadline)
            else:
                self._answer_value(source, content.value, fetch.context, deadline)

        def answer_later(content: Content) -> None:
            # Each on a thread of its own: one fetcher that does not read must not hold up others.
            job = partial(self._agent.guarded, source, partial(answer, content))
            self._agent.dispatch.service.submit_or_run(job)

        self._refs.content(fetch.ref).on_settled(answer_later)

    def _serve_backward(self, message: BackwardFrom, _: Payload, source: Source) -> None:
        deadline = self._agent.clock.now() + message.seconds
        hold = Hold(message.ref, self._agent.directory.me.id, None)
        root = checked_root(self._refs.value_here(hold, deadline))
        with self._inside(message.context, deadline):
            context = self._engine.contexts.find(message.context)
            self._engine.root.backward(context, [root], retain_graph=message.retain_graph)
        self._agent.answer(source, Done(), deadline=deadline)


def checked_root(value: object) -> torch.Tensor:
    """The value of a reference as a root of backward."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"RRef should contain a tensor for .backward(), but holds a {type(value).__name__}"
        )
    return check_root(value)


def _parcel_of(answer: Answer) -> tuple[Parcel, Payload]:
    if not isinstance(answer.message, Result):
        raise BadMessage(f"a call was answered by {type(answer.message).__name__}")
    return answer.message.parcel, answer.payload


@contextmanager
def _modes(grad_enabled: bool, inference: bool) -> Iterator[None]:
    """The caller's modes: no_grad there is no_grad here."""
    with torch.inference_mode(inference), torch.set_grad_enabled(grad_enabled):
        yield
