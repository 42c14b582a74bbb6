"""A call, on the worker that runs the function: decode, run, encode, answer.

_serve   answers with the result of the function; if it is marked async_execution, with the result
         of the future that it returned
_keep    keeps the result here instead, for holders of a reference to it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, final

import torch

from gradwire.agent.agent import Agent
from gradwire.agent.messages import Done
from gradwire.agent.remote_errors import noted
from gradwire.agent.requests.timer import ShortenedDeadline
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.autograd.api import check_scalar_root
from gradwire.autograd.engine import Engine
from gradwire.autograd.modes import in_modes
from gradwire.autograd.scope import enter, leave
from gradwire.current import get_current, reset_current, set_current
from gradwire.errors import BadMessage, GradwireError, NotExposed, UsageError
from gradwire.ids import CallId, ContextId, ForkId, WorkerId
from gradwire.rpc.behavior import Behavior
from gradwire.rpc.codec.body import BodyCodec
from gradwire.rpc.expose.async_execution import LATER, Later, later_of, result_of
from gradwire.rpc.expose.registry import Registry
from gradwire.rpc.messages import BackwardFrom, Call, Fetch, Kept, Reference, Result, ValueReady
from gradwire.rpc.profiling import function_span
from gradwire.rpc.recompute.checkpoint_run import CalleeRun
from gradwire.rpc.recompute.generators import Generators
from gradwire.rpc.refs.handles_state import RefHandle
from gradwire.rpc.refs.permissions import check_kept
from gradwire.rpc.refs.refs import Content, Raised, Refs, Value
from gradwire.torch_private import NOTHING, is_profiled

if TYPE_CHECKING:
    from gradwire.rpc.worker import Worker

Use = Callable[[Content], None]


_PENDING = object()


@final
class CallScope:
    """The scope of a served function: its worker, its context, its deadline, its request.

    The constructor enters it; `leave` or the end of a `with` block leaves it. An outer deadline
    that is earlier stays. Without a request, the one around it stays. Graphs that it makes keep
    their tensors as the engine says, in a context or not, if graphs cross workers there.

    hot: each call served, so it is not made of nested `with` blocks
    """

    __slots__ = ("_context", "_drawing", "_kept", "_outer")

    def __init__(
        self,
        worker: Worker,
        context: ContextId | None,
        deadline: float = math.inf,
        inbound: object = None,
        *,
        makes_graphs: bool = True,
    ) -> None:
        self._drawing: AbstractContextManager[object] | None = None
        if worker.own is not None:  # it draws from its own random generator
            self._drawing = worker.own.drawing()
            self._drawing.__enter__()
        _, outer_deadline, outer_inbound, run, _ = get_current()
        if outer_deadline < deadline:
            deadline = outer_deadline
        if inbound is None:
            self._outer = set_current((worker, deadline, outer_inbound, run, None))
        else:
            self._outer = set_current((worker, deadline, inbound, None, None))
        self._context = context
        self._kept: AbstractContextManager[object] | None = None
        engine = worker.engine
        if context is not None:
            enter(context, engine.saving)
        elif engine.saving is not None and makes_graphs and not engine.only_in_contexts:
            self._kept = engine.saving()
            self._kept.__enter__()

    def leave(self) -> None:
        """Restore what was current before."""
        if self._kept is not None:
            self._kept.__exit__(None, None, None)
        if self._context is not None:
            leave(self._context)
        reset_current(self._outer)
        if self._drawing is not None:
            self._drawing.__exit__(None, None, None)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.leave()


ScopeFactory = Callable[[ContextId | None, float, Source], CallScope]
"""Enters the scope of a served function: the worker, its context, its deadline, the request."""


@final
class CallServer:
    """Serves calls, fetches and remote backwards that peers ask of one worker."""

    def __init__(
        self,
        agent: Agent,
        engine: Engine,
        refs: Refs,
        bodies: BodyCodec,
        registry: Registry,
        scope_for: ScopeFactory,
        behavior: Behavior,
        generators: Generators,
    ) -> None:
        self._agent, self._engine, self._refs = agent, engine, refs
        self._bodies, self._registry, self._scope_for = bodies, registry, scope_for
        self._generators = generators
        self._behavior = behavior
        agent.handle(Call, self._serve, Lane.USER, attrgetter("function"), self._refuse)
        agent.handle(Fetch, self._serve_fetch, Lane.USER)
        agent.handle(BackwardFrom, self._serve_backward, Lane.USER)

    def _serve(self, call: Call, payload: Payload, source: Source) -> None:
        deadline = self._agent.clock.now() + call.seconds
        if call.body.released:
            self._engine.releases.heard(call.body.released, source.worker)
        if call.depth > 0:
            deadline = ShortenedDeadline(deadline, call.depth, call.room, call.seconds)
        if call.keep is not None:
            self._keep(call, call.keep, payload, source, deadline)
            return
        references, value = call.body.references, _PENDING
        try:
            value = self._run(call, payload, source, deadline)
            if type(value) is Later:
                answer = partial(self._answer_content, source, call.context, deadline, references)
                self._when_done(value, partial(self._answer_on_pool, source, answer))
                value = _PENDING
        finally:
            if references and value is _PENDING:  # it raised, or its future may take long
                self._refs.piggybacked.send_separately(references)
        if value is _PENDING:
            return
        if references:
            self._answer_content(source, call.context, deadline, references, Value(value))
        elif not source.cancelled:
            self._answer_value(source, value, call.context, deadline, ())

    def _refuse(self, call: Call, source: Source) -> None:
        """Drop the references and edges of a call that was cancelled before it began."""
        self._refs.release(call.body.references)
        self._engine.releases.heard(call.body.released, source.worker)
        self._engine.drop_crossings(call.body.crossings, source.worker)

    def _keep(
        self, call: Call, keep: Kept, payload: Payload, source: Source, deadline: float
    ) -> None:
        check_kept(keep, source.worker, self._agent.directory.me.id)
        self._agent.dispatch.inbound_requests.discard(source)  # others may handle the reference
        try:
            self._refs.check_limit(source.worker)
            promise = self._refs.creation_arrived(keep.ref, keep.fork, source)
        except GradwireError:
            self._refs.release(call.body.references)
            raise
        is_repeatable = call.draws is not None  # its draws are known only when the value is made
        at_once = not self._behavior.answers_when_made and not is_repeatable

        def settle(content: Content) -> None:
            promise.settle(content)
            if not at_once:
                made = ValueReady(source.note) if is_repeatable else Done()
                self._agent.answer(source, made, deadline=deadline)

        try:
            if at_once:
                self._agent.answer(source, Done(), deadline=deadline)
            value = self._run(call, payload, source, deadline)
            if type(value) is Later:
                self._when_done(value, settle)
                return
            content: Content = Value(value)
        except BaseException as error:  # raised by each fetch of the value
            self._agent.noting.note(source.worker, error)
            content = Raised(self._agent.describe(error))
        settle(content)

    def _run(self, call: Call, payload: Payload, source: Source, deadline: float) -> object:
        """What the function returned; a Later, if that is a future.

        hot: every call served
        """
        if call.context is not None:
            try:
                self._engine.works_in(call.context, source)
            except GradwireError:
                self._refuse(call, source)
                raise
        scope = self._scope_for(call.context, deadline, source)
        try:
            grad, inference = call.grad_enabled, call.inference
            if call.modes is not None:
                with (
                    in_modes(call.modes),
                    torch.inference_mode(inference),
                    torch.set_grad_enabled(grad),
                ):
                    return self._result(call, payload, source, deadline)
            # The function runs in the caller's modes. Mostly this thread has them already.
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
        except Exception as error:  # the caller may catch it, so its draws are sent as well
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
            function, args = self._function_in_arguments(name, args, deadline)
        else:
            function = self._registry.lookup(name)
        if is_profiled():
            with function_span(name):
                return result_of(function, *args, **kwargs)
        value = function(*args, **kwargs)
        return later_of(function, value) if hasattr(function, LATER) else value

    def _when_done(self, later: Later, use: Use) -> None:
        later.future.add_done_callback(lambda done: use(self._content_of(done, later)))

    def _content_of(self, future: torch.futures.Future[Any], later: Later) -> Content:
        error: BaseException | None = None
        try:
            value = future.value()
        except BaseException as raised:  # sent to the caller
            error = raised
        try:
            if later.finish is not None:
                later.finish(error)
        except BaseException as refused:
            error = refused
        return Value(value) if error is None else Raised(self._agent.describe(error))

    def _answer_on_pool(self, source: Source, answer: Use, content: Content) -> None:
        """Answer on the pool: the thread that settles a future may be one that reads a channel."""
        job = partial(self._agent.guarded, source, partial(answer, content))
        self._agent.dispatch.service.submit_or_run(job)

    def _function_in_arguments(
        self, name: str, args: tuple[object, ...], deadline: float
    ) -> tuple[Callable[..., object], tuple[object, ...]]:
        """The function, which is the first argument or a method of it, and the other arguments."""
        if name.startswith("!"):
            return self._pickled_function(name, args)
        handle = getattr(args[0], "handle", None) if args else None
        if not isinstance(handle, RefHandle):
            raise BadMessage(f"the method {name[1:]} was called without a reference")
        value = self._refs.value_here(handle, deadline)
        return self._registry.method(value, name[1:]), args[1:]

    def _pickled_function(
        self, name: str, args: tuple[object, ...]
    ) -> tuple[Callable[..., object], tuple[object, ...]]:
        if not self._behavior.pickle:
            me = self._agent.directory.me.name
            raise NotExposed(
                f"{name[1:]} was sent to {me} as a function, not by its name",
                hint="both workers must use gradwire's API, or both torch's",
            )
        if not args or not callable(args[0]):
            raise BadMessage(f"the function {name[1:]} did not come with its call")
        return args[0], args[1:]

    def _answer_content(
        self,
        source: Source,
        context: ContextId | None,
        deadline: float,
        references: Sequence[Reference],
        content: Content,
    ) -> None:
        """Answer with a value or an error. `references` are those of the call.

        See Note [An answer accepts], refs/server.py.
        """
        left = False
        try:
            if isinstance(content, Raised):
                failure = noted(content.failure, source.note)
                self._agent.answer(source, failure, deadline=deadline)
            elif not source.cancelled:
                accepted = (
                    self._refs.piggybacked.accepted_by_answer(references) if references else ()
                )
                left = self._answer_value(source, content.value, context, deadline, accepted)
                if accepted and left:
                    self._refs.piggybacked.answer_sent(accepted)
        finally:
            if references and not left:
                self._refs.piggybacked.send_separately(references)

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
        if self._agent.events.listeners:
            call = CallId(source.worker, source.request)
            self._agent.events.emit("answer", call, self._agent.directory.name(source.worker))
        left = False
        try:
            result = Result(packed.body, accepted, packed.copies, source.note)
            left = self._agent.answer(source, result, packed.payload, deadline=deadline)
            if left and packed.body.released:
                self._engine.releases.rode(source.worker, packed.body.released)
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
        # On the pool: a fetcher that does not read must not block the thread that settles.
        content.on_settled(partial(self._answer_on_pool, source, answer))

    def _serve_backward(self, message: BackwardFrom, _: Payload, source: Source) -> None:
        deadline = self._engine.deadline_for_peer(message.seconds)
        handle = RefHandle(message.ref, self._agent.directory.me.id, None)
        self._refs.content(message.ref, source.worker)
        root = check_scalar_root(checked_tensor(self._refs.value_here(handle, deadline)))
        modes = NOTHING if message.modes is None else in_modes(message.modes)
        with self._scope_for(message.context, deadline, source), modes:
            context = self._engine.contexts.find(message.context)
            self._engine.works_in(context.id, source)
            self._engine.coordinator.backward(context, [root], retain_graph=message.retain_graph)
        self._agent.answer(source, Done(), deadline=deadline)


def checked_tensor(value: object) -> torch.Tensor:
    """The value of a reference, if it is a tensor, at which backward can begin."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"RRef should contain a tensor for .backward(), but holds a {type(value).__name__}"
        )
    return value
