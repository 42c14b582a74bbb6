"""A call, on the worker that runs the function: unpack, run, pack, answer.

_serve   answers with what the function returns; one marked async_execution, with what its
         future brings
_keep    keeps it here instead, for those who hold a reference to it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, final

import torch

from gradwire.agent.agent import Agent
from gradwire.agent.messages import Done
from gradwire.agent.remote_errors import noted
from gradwire.agent.requests.timer import Cut
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.autograd.anomaly import under
from gradwire.autograd.api import check_scalar_root
from gradwire.autograd.engine import Engine
from gradwire.autograd.profiling import function_span
from gradwire.errors import BadMessage, GradwireError, NotExposed, UsageError
from gradwire.ids import CallId, ContextId, ForkId, WorkerId
from gradwire.rpc.behavior import Behavior
from gradwire.rpc.codec.body import BodyCodec
from gradwire.rpc.expose.async_execution import LATER, Later, later_of, result_of
from gradwire.rpc.expose.registry import Registry
from gradwire.rpc.messages import BackwardFrom, Call, Fetch, Kept, Made, Reference, Result
from gradwire.rpc.recompute.checkpoint_run import CalleeRun
from gradwire.rpc.recompute.generators import Generators
from gradwire.rpc.refs.handles_state import RefHandle
from gradwire.rpc.refs.permissions import check_kept
from gradwire.rpc.refs.refs import Content, Raised, Refs, Value
from gradwire.torch_private import is_profiled


class Scope(AbstractContextManager[None], Protocol):
    """A block that begins when it is made."""

    def leave(self) -> None:
        """It is over: what the end of the block does."""


Inside = Callable[[ContextId | None, float, Source], Scope]
"""The scope of a served function: this worker, its context, its deadline, who asked."""
Use = Callable[[Content], None]


_NOTHING_YET = object()


@final
class Serving:
    """What the peers of one worker ask it to run."""

    def __init__(
        self,
        agent: Agent,
        engine: Engine,
        refs: Refs,
        bodies: BodyCodec,
        registry: Registry,
        inside: Inside,
        behavior: Behavior,
        generators: Generators,
    ) -> None:
        self._agent, self._engine, self._refs = agent, engine, refs
        self._bodies, self._registry, self._inside = bodies, registry, inside
        self._generators = generators
        self._behavior = behavior
        agent.handle(Call, self._serve, Lane.USER, attrgetter("function"), self._refuse)
        agent.handle(Fetch, self._serve_fetch, Lane.USER)
        agent.handle(BackwardFrom, self._serve_backward, Lane.USER)

    def _serve(self, call: Call, payload: Payload, source: Source) -> None:
        deadline = self._agent.clock.now() + call.seconds
        if call.depth > 0:
            deadline = Cut(deadline, call.depth, call.room, call.seconds)
        if call.keep is not None:
            self._keep(call, call.keep, payload, source, deadline)
            return
        came, value = call.body.references, _NOTHING_YET
        try:
            value = self._run(call, payload, source, deadline)
            if type(value) is Later:
                answer = partial(self._answer_content, source, call.context, deadline, came)
                self._when_done(value, partial(self._guard, source, answer))
                value = _NOTHING_YET
        finally:
            if came and value is _NOTHING_YET:  # it raised, or may take as long as it likes
                self._refs.piggybacked.send_separately(came)
        if value is _NOTHING_YET:
            return
        if came:
            self._answer_content(source, call.context, deadline, came, Value(value))
        elif not source.cancelled:
            self._answer_value(source, value, call.context, deadline, ())

    def _refuse(self, call: Call) -> None:
        """It was called off before it began."""
        self._refs.release(call.body.references)

    def _keep(
        self, call: Call, keep: Kept, payload: Payload, source: Source, deadline: float
    ) -> None:
        check_kept(keep, source.worker, self._agent.directory.me.id)
        self._agent.dispatch.inbound_requests.discard(source)  # others may hold the reference
        try:
            self._refs.check_limit(source.worker)
            promise = self._refs.creation_arrived(keep.ref, keep.fork, source)
        except GradwireError:
            self._refs.release(call.body.references)
            raise
        is_repeatable = call.draws is not None  # what was drawn is known when it is made
        at_once = not self._behavior.answers_when_made and not is_repeatable

        def settle(content: Content) -> None:
            promise.settle(content)
            if not at_once:
                made = Made(source.note) if is_repeatable else Done()
                self._agent.answer(source, made, deadline=deadline)

        try:
            if at_once:
                self._agent.answer(source, Done(), deadline=deadline)
            value = self._run(call, payload, source, deadline)
            if type(value) is Later:
                self._when_done(value, settle)
                return
            content: Content = Value(value)
        except BaseException as error:  # whoever fetches the value is told
            self._agent.noting.note(source.worker, error)
            content = Raised(self._agent.describe(error))
        settle(content)

    def _run(self, call: Call, payload: Payload, source: Source, deadline: float) -> object:
        """What the function returned; Later, if that is to come.

        hot: every call served
        """
        if call.context is not None:
            try:
                self._engine.works_in(call.context, source)
            except GradwireError:
                self._refs.release(call.body.references)
                raise
        scope = self._inside(call.context, deadline, source)
        try:
            grad, inference = call.grad_enabled, call.inference
            if call.anomaly:
                with (
                    under(call.anomaly),
                    torch.inference_mode(inference),
                    torch.set_grad_enabled(grad),
                ):
                    return self._result(call, payload, source, deadline)
            # The caller's modes: no_grad there is no_grad here. Mostly they are ours already.
            if torch.is_grad_enabled() is grad and torch.is_inference_mode_enabled() is inference:
                return self._result(call, payload, source, deadline)
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                return self._result(call, payload, source, deadline)
        finally:
            scope.leave()

    def _result(self, call: Call, payload: Payload, source: Source, deadline: float) -> object:
        if call.draws is None:
            return self._returned(call, payload, source.worker, deadline)
        me = self._agent.directory.me.name
        served = CalleeRun(self._generators, call.draws, call.function, me)
        try:
            with served:
                value = self._returned(call, payload, source.worker, deadline)
        except Exception as error:  # the caller may catch it, and go on with what it tells
            source.note = served.note(error)
            raise
        if type(value) is Later:

            def finish(error: BaseException | None) -> None:
                source.note = served.later_note(error)

            return value._replace(finish=finish)
        source.note = served.note()
        return value

    def _returned(self, call: Call, payload: Payload, caller: WorkerId, deadline: float) -> object:
        body, name = call.body, call.function
        unpacked = self._bodies.decode(
            body,
            payload,
            source=caller,
            context=call.context,
            is_answered=call.keep is None,
        )
        if self._behavior.counts_before_use:
            self._refs.wait_until_all_counted(body.references, deadline)
        match unpacked.value:
            case (tuple() as args, dict() as kwargs):
                pass
            case _:
                raise BadMessage("a call came without arguments")
        if name.startswith((".", "!")):
            function, args = self._brought_along(name, args, deadline)
        else:
            function = self._registry.lookup(name)
        if is_profiled():
            with function_span(name):
                return result_of(function, *args, **kwargs)
        value = function(*args, **kwargs)
        return later_of(function, value) if hasattr(function, LATER) else value

    def _when_done(self, later: Later, use: Use) -> None:
        later.future.add_done_callback(lambda done: use(self._brought(done, later)))

    def _brought(self, future: torch.futures.Future[Any], later: Later) -> Content:
        error: BaseException | None = None
        try:
            value = future.value()
        except BaseException as raised:  # the asker is told
            error = raised
        try:
            if later.finish is not None:
                later.finish(error)
        except BaseException as refused:
            error = refused
        return Value(value) if error is None else Raised(self._agent.describe(error))

    def _guard(self, source: Source, answer: Use, content: Content) -> None:
        """Answer from a thread of ours: a future is completed by any, even one that reads."""
        job = partial(self._agent.guarded, source, partial(answer, content))
        self._agent.dispatch.service.submit_or_run(job)

    def _brought_along(
        self, name: str, args: tuple[object, ...], deadline: float
    ) -> tuple[Callable[..., object], tuple[object, ...]]:
        """The function that a call brings with its arguments, and the rest of these."""
        if name.startswith("!"):
            return self._sent(name, args)
        handle = getattr(args[0], "handle", None) if args else None
        if not isinstance(handle, RefHandle):
            raise BadMessage(f"the method {name[1:]} was called on no reference")
        value = self._refs.value_here(handle, deadline)
        return self._registry.method(value, name[1:]), args[1:]

    def _sent(
        self, name: str, args: tuple[object, ...]
    ) -> tuple[Callable[..., object], tuple[object, ...]]:
        if not self._behavior.pickle:
            me = self._agent.directory.me.name
            raise NotExposed(
                f"{name[1:]} was sent to {me} as a function, not by its name",
                hint="functions travel as names; both workers must be of one behavior",
            )
        if not args or not callable(args[0]):
            raise BadMessage(f"the function {name[1:]} did not come with its call")
        return args[0], args[1:]

    def _answer_content(
        self,
        source: Source,
        context: ContextId | None,
        deadline: float,
        came: Sequence[Reference],
        content: Content,
    ) -> None:
        """`came` are the references of the call.

        See Note [An answer accepts], refs/server.py.
        """
        left = False
        try:
            if isinstance(content, Raised):
                failure = noted(content.failure, source.note)
                self._agent.answer(source, failure, deadline=deadline)
            elif not source.cancelled:
                accepted = self._refs.piggybacked.accepted_by_answer(came) if came else ()
                left = self._answer_value(source, content.value, context, deadline, accepted)
                if accepted and left:
                    self._refs.piggybacked.answer_sent(accepted)
        finally:
            if came and not left:
                self._refs.piggybacked.send_separately(came)

    def _answer_value(
        self,
        source: Source,
        value: object,
        context: ContextId | None,
        deadline: float,
        accepted: Sequence[ForkId],
    ) -> bool:
        packed = self._bodies.encode(
            value, to=source.worker, context=context, place="result", deadline=deadline
        )
        if self._agent.events.are_heard:
            call = CallId(source.worker, source.request)
            self._agent.events.emit("answer", call, self._agent.directory.name(source.worker))
        left = False
        try:
            result = Result(packed.body, accepted, packed.copies, source.note)
            left = self._agent.answer(source, result, packed.payload, deadline=deadline)
        finally:
            if not left:
                self._bodies.undo(packed)
        return left

    def _serve_fetch(self, fetch: Fetch, _: Payload, source: Source) -> None:
        deadline = self._agent.clock.now() + fetch.seconds
        answer = partial(self._answer_content, source, fetch.context, deadline, ())
        content = self._refs.content(fetch.ref, source.worker)
        if fetch.context is not None:
            self._engine.works_in(fetch.context, source)
        # Each on a thread of its own: one fetcher that does not read must not hold up others.
        content.on_settled(partial(self._guard, source, answer))

    def _serve_backward(self, message: BackwardFrom, _: Payload, source: Source) -> None:
        deadline = self._engine.deadline_for_peer(message.seconds)
        hold = RefHandle(message.ref, self._agent.directory.me.id, None)
        self._refs.content(message.ref, source.worker)
        root = check_scalar_root(checked_tensor(self._refs.value_here(hold, deadline)))
        with self._inside(message.context, deadline, source), under(message.anomaly):
            context = self._engine.contexts.find(message.context)
            self._engine.works_in(context.id, source)
            self._engine.coordinator.backward(context, [root], retain_graph=message.retain_graph)
        self._agent.answer(source, Done(), deadline=deadline)


def checked_tensor(value: object) -> torch.Tensor:
    """The value of a reference, if backward can begin there at all."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"RRef should contain a tensor for .backward(), but holds a {type(value).__name__}"
        )
    return value
