"""A call, on the worker that runs the function: decode, run, encode, answer.

serve    answers with the result of the function; if it is marked async_execution, with the result
         of the future that it returned
_keep    keeps the result here instead, for holders of a reference to it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from types import CoroutineType
from typing import TYPE_CHECKING, Any, final

import torch
from torch import is_grad_enabled, is_inference_mode_enabled

from gradwire.agent.devices.maps import inverted
from gradwire.agent.messages import Done
from gradwire.agent.remote_errors import noted
from gradwire.agent.requests.timer import Clock, ShortenedDeadline
from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.agent.serving.peer_limits import one_more
from gradwire.agent.serving.thread_pool import Job
from gradwire.autograd.api import check_scalar_root, checked_tensor
from gradwire.autograd.modes import in_modes
from gradwire.autograd.scope import stay_in
from gradwire.current import get_current, reset_current, set_current
from gradwire.errors import BadMessage, GradwireError, NotExposed
from gradwire.events import Add
from gradwire.ids import CallId, ContextId, ForkId, WorkerId
from gradwire.rpc.codec.body import BodyCodec
from gradwire.rpc.codec.tensors_of import tensors_in
from gradwire.rpc.expose.async_execution import LATER, Later, later_of
from gradwire.rpc.expose.registry import Registry
from gradwire.rpc.messages import BackwardFrom, Call, Fetch, Kept, Reference, Result, ValueReady
from gradwire.rpc.profiling import function_span
from gradwire.rpc.recompute.checkpoint_run import CalleeRun
from gradwire.rpc.recompute.left_open import end_left_open, opened
from gradwire.rpc.refs.exchange import check_kept
from gradwire.rpc.refs.handles_state import RefHandle
from gradwire.rpc.refs.refs import Content, Raised, Value
from gradwire.threads import leave_fork
from gradwire.torch_private import NOTHING, is_profiled

if TYPE_CHECKING:
    from gradwire.rpc.worker import Worker

Use = Callable[[Content], None]


@final
class CallScope:
    """The scope of a served function: its worker, its context, its deadline, its request.

    The constructor enters it; `leave` or the end of a `with` block leaves it. The earlier of the
    outer and the new deadline counts. Without a request, the outer one stays current. Tensors saved
    for backward are kept as `engine.saving` says: in a context, and outside of one unless graphs
    are recorded only in contexts.

    hot: each call served, so it is not made of nested `with` blocks
    """

    __slots__ = ("_drawing", "_kept", "_outer", "_stay")

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
        engine, stay = worker.engine, None
        kept: AbstractContextManager[object] | None = None
        if context is not None:
            stay = stay_in(context, engine.saving)
            kept = stay[1]
        elif engine.saving is not None and makes_graphs and not engine.only_in_contexts:
            kept = engine.saving()
            kept.__enter__()
        self._stay, self._kept = stay, kept
        _, outer_deadline, outer_inbound, run, _ = get_current()
        if outer_deadline < deadline:
            deadline = outer_deadline
        if inbound is None:
            self._outer = set_current((worker, deadline, outer_inbound, run, stay))
        else:
            self._outer = set_current((worker, deadline, inbound, None, stay))

    def leave(self) -> None:
        """Restore what was current before."""
        # A function may have left the context itself, and with it what was entered for it.
        if self._kept is not None and (self._stay is None or get_current()[4] is self._stay):
            self._kept.__exit__(None, None, None)
        reset_current(self._outer)
        if self._drawing is not None:
            self._drawing.__exit__(None, None, None)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.leave()


@final
class CallServer:
    """Serves calls, fetches and remote backwards that peers ask of one worker."""

    def __init__(self, worker: Worker, bodies: BodyCodec, registry: Registry) -> None:
        agent = self._agent = worker.agent
        self._engine, self._refs, self._behavior = worker.engine, worker.refs, worker.behavior
        self._bodies, self._registry, self._generators = bodies, registry, worker.generators
        self._scope_for, self._served = partial(CallScope, worker), agent.dispatch.served
        self.begin_task: Callable[..., Later] | None = None
        """runs the coroutines of `async def` functions; see event_loop.py"""
        self.around: Callable[..., object] | None = None
        """runs the functions that come with their calls; it gets each with its arguments"""
        agent.handle(Call, self.serve, Lane.USER, attrgetter("function"), self.cancelled)
        agent.handle(Fetch, self._serve_fetch, Lane.USER)
        agent.handle(BackwardFrom, self._serve_backward, Lane.USER)

    def serve(self, call: Call, payload: Payload, source: Source) -> Later | None:
        """Run a call and answer it; Later, if it is not over."""
        deadline = self._agent.clock.now() + call.seconds
        if call.body.released:
            self._engine.releases.heard(call.body.released, source.worker)
        source.device_map, source.in_pass = call.device_map, call.in_pass
        if call.depth > 0:
            deadline = ShortenedDeadline(deadline, call.depth, call.room, call.seconds)
        if call.keep is not None:
            self._keep(call, call.keep, payload, source, deadline)
            return None
        references = call.body.references
        try:
            value = self._run(call, payload, source, deadline)
        except BaseException:
            one_more(self._served.raised, source.worker)
            if references:
                self._refs.piggybacked.send_separately(references)
            raise
        if type(value) is Later:
            if references:  # the future may take long
                self._refs.piggybacked.send_separately(references)
            answer = partial(self._answer_content, source, call.context, deadline, references)
            self._when_done(value, source, partial(self._answer_on_pool, source, answer))
            return value
        one_more(self._served.answered, source.worker)
        if references:
            self._answer_content(source, call.context, deadline, references, Value(value))
        elif not source.cancelled:
            self._answer_value(source, value, call.context, deadline, ())
        return None

    def cancelled(self, call: Call, source: Source) -> None:
        """Nobody waits for the answer any more, and it has not begun."""
        one_more(self._served.cancelled, source.worker)
        self._refuse(call, source)

    def _refuse(self, call: Call, source: Source) -> None:
        """Drop the references and edges of a call that was cancelled or refused before it began."""
        self._refs.release(call.body.references)
        self._engine.releases.heard(call.body.released, source.worker)
        self._engine.drop_crossings(call.body.crossings, source.worker)
        self._engine.devices.drop(call.body.tensors, source.worker)

    def _keep(
        self, call: Call, keep: Kept, payload: Payload, source: Source, deadline: float
    ) -> None:
        check_kept(keep, source.worker, self._agent.directory.me.id)
        source.is_kept = True  # others may handle the reference
        try:
            self._refs.check_limit(source.worker)
            promise = self._refs.creation_arrived(keep.ref, keep.fork, source)
        except GradwireError:
            self._refuse(call, source)
            raise
        # The random numbers that it draws are known only after it has run.
        is_repeatable = call.draws is not None
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
                self._when_done(value, source, settle)
                return
            content: Content = Value(value)
            one_more(self._served.answered, source.worker)
        except BaseException as error:  # raised by each fetch of the value
            one_more(self._served.raised, source.worker)
            self._agent.noting.note(source.worker, error)
            content = Raised(self._agent.describe(error))
        settle(content)

    def _run(self, call: Call, payload: Payload, source: Source, deadline: float) -> object:
        """What the function returned; a Later, if that is a future. hot: every call served"""
        if call.context is not None:
            try:
                self._engine.works_in(call.context, source)
            except GradwireError:
                self._refuse(call, source)
                raise
        result = self._result if call.draws is None else self._result_with_draws
        scope = self._scope_for(call.context, deadline, source)
        if call.traceparent and (observer := self._agent.events.observer) is not None:
            result = observer.serving(call, result)
        try:
            grad, inference = call.grad_enabled, call.inference
            if call.modes is not None:
                with (
                    in_modes(call.modes),
                    torch.inference_mode(inference),
                    torch.set_grad_enabled(grad),
                ):
                    return result(call, payload, source, deadline)
            # The function runs in the caller's modes. Mostly this thread has them already.
            if is_grad_enabled() is grad and is_inference_mode_enabled() is inference:
                return result(call, payload, source, deadline)
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                return result(call, payload, source, deadline)
        except BaseException:
            if call.body.crossings:  # release those that have not become Recvs
                self._engine.drop_crossings(call.body.crossings, source.worker)
            raise
        finally:
            if opened.checkpoints:
                end_left_open()
            scope.leave()

    def _result_with_draws(
        self, call: Call, payload: Payload, source: Source, deadline: float
    ) -> object:
        assert call.draws is not None
        me = self._agent.directory.me.name
        served = CalleeRun(self._generators, call.draws, call.function, me)
        try:
            with served.run:
                value = self._result(call, payload, source, deadline)
        except Exception as error:  # the caller may catch it, so its draws are sent as well
            source.note = served.note(error)
            raise
        if type(value) is Later:
            return value._replace(note=served.later_note)
        source.note = served.note()
        return value

    def _result(self, call: Call, payload: Payload, source: Source, deadline: float) -> object:
        body, name = call.body, call.function
        unpacked = self._bodies.decode(
            body, payload, source=source.worker, context=call.context, is_answered=call.keep is None
        )
        if self._behavior.counts_before_use:
            self._refs.wait_until_all_counted(body.references, deadline)
        match unpacked.value:
            case (tuple() as args, dict() as kwargs):
                pass
            case _:
                raise BadMessage("the body of a call does not hold its arguments")
        if name.startswith((".", "!")):
            first, args = args[0] if args else None, args[1:]
            function = self._function_in(first, name, deadline)
        else:
            function = self._registry.lookup(name)
        if is_profiled():
            with function_span(name):
                value = function(*args, **kwargs)
        else:
            value = function(*args, **kwargs)
        if self._agent.dispatch.is_forked:  # before anything is answered: locks may be held
            leave_fork(None)
        if type(value) is CoroutineType and self.begin_task is not None:
            return self.begin_task(call, value, source, deadline)
        return later_of(function, value) if hasattr(function, LATER) else value

    def _when_done(self, later: Later, source: Source, use: Use) -> None:
        note = later.note

        def done(future: torch.futures.Future[Any]) -> None:
            error: BaseException | None = None
            try:
                value = future.value()
                if later.finish is not None:
                    value = later.finish(value)
                # This thread has the streams on which the future was completed.
                self._engine.devices.join_default_streams([*tensors_in(value)])
            except BaseException as raised:  # sent to the caller
                error = raised
            try:
                if note is not None:
                    source.note = note(error)
            except BaseException as refused:
                error = refused
            served = self._served
            one_more(served.answered if error is None else served.raised, source.worker)
            use(Value(value) if error is None else Raised(self._agent.describe(error)))

        later.future.add_done_callback(done)

    def _answer_on_pool(self, source: Source, answer: Use, content: Content) -> None:
        """Answer on the pool: the thread that settles a future may be one that reads a channel."""
        job = partial(self._agent.guarded, source, partial(answer, content))
        if (record := self._agent.events.record) is not None:
            me, now = self._agent.directory.me.id, self._agent.clock.now()
            call = CallId(source.worker, source.request)
            record("hand over", now, call, me)
            job = partial(_handed_over, job, record, call, me, self._agent.clock)
        self._agent.dispatch.service.submit_or_run(job)

    def _function_in(self, first: object, name: str, deadline: float) -> Callable[..., object]:
        """For `!name` the first argument; for `.name` that method of what it refers to."""
        kind, name = name[0], name[1:]
        if kind == ".":
            handle = getattr(first, "handle", None)
            if not isinstance(handle, RefHandle):
                raise BadMessage(f"the method {name} was called without a reference")
            return self._registry.method(self._refs.value_here(handle, deadline), name)
        if not self._behavior.pickle:
            me = self._agent.directory.me.name
            raise NotExposed(
                f"{name} was sent to {me} as a function, not by its name",
                hint="both workers must use gradwire's API, or both torch's",
            )
        if not callable(first):
            raise BadMessage(f"the function {name} did not come with its call")
        return first if self.around is None else partial(self.around, first)

    def _answer_content(
        self,
        source: Source,
        context: ContextId | None,
        deadline: float,
        references: Sequence[Reference],
        content: Content,
    ) -> None:
        """Answer with a value or an error. `references` are those of the call.

        See Note [An answer accepts], refs/exchange.py.
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
        to, device_map = source.worker, source.device_map and inverted(source.device_map)
        packed = self._bodies.encode(value, to, context, "result", deadline, device_map)
        left = False
        try:
            result = Result(packed.body, accepted, packed.copies, source.note)
            left = self._agent.answer(source, result, packed.payload, deadline=deadline)
            if left and packed.body.released:
                self._engine.releases.rode(source.worker, packed.body.released)
        finally:
            if not left:
                self._bodies.undo(packed, to)
        return left

    def _serve_fetch(self, fetch: Fetch, _: Payload, source: Source) -> None:
        deadline = self._agent.clock.now() + fetch.seconds
        source.device_map = fetch.device_map
        answer = partial(self._answer_content, source, fetch.context, deadline, ())
        content = self._refs.content(fetch.ref, source.worker)
        if fetch.context is not None:
            self._engine.works_in(fetch.context, source)
        # On the pool: sending blocks if the peer does not read, and the thread that settles must
        # not be held up.
        content.on_settled(partial(self._answer_on_pool, source, answer))

    def _serve_backward(self, message: BackwardFrom, _: Payload, source: Source) -> None:
        deadline = self._engine.deadline_for_peer(message.seconds)
        handle = RefHandle(message.ref, self._agent.directory.me.id, None)
        self._refs.content(message.ref, source.worker)
        root = checked_tensor(self._refs.value_here(handle, deadline))
        check_scalar_root(root)
        modes = NOTHING if message.modes is None else in_modes(message.modes)
        with self._scope_for(message.context, deadline, source), modes:
            context = self._engine.contexts.find(message.context)
            self._engine.works_in(context.id, source)
            self._engine.coordinator.backward(context, [root], retain_graph=message.retain_graph)
        self._agent.answer(source, Done(), deadline=deadline)


def _handed_over(job: Job, record: Add, call: CallId, me: WorkerId, clock: Clock) -> None:
    """An answer that another thread has computed is sent by this one."""
    began = clock.now()
    job()
    record("handed over", began, call, me)
