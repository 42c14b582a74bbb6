"""A call, on the worker that makes it: encode, send, wait. The callee's side is server.py.

docs/concepts/calls.md lists the functions that a call goes through on both workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast, final

import msgspec
from msgspec.structs import replace
from torch import is_grad_enabled, is_inference_mode_enabled

from gradwire.agent.agent import Agent, Answer, Outcome
from gradwire.agent.devices.maps import checked_map
from gradwire.agent.remote_errors import fresh
from gradwire.agent.requests.promise import Pending, Promise
from gradwire.agent.requests.timer import OUTERMOST, extent_of
from gradwire.agent.serving.peer_limits import EACH
from gradwire.autograd.backward.engine_run import is_in_pass
from gradwire.autograd.engine import Engine
from gradwire.autograd.graph.walk import lift_this_thread
from gradwire.autograd.modes import current_modes
from gradwire.autograd.scope import current_context
from gradwire.current import current_inbound, get_current
from gradwire.errors import BadMessage
from gradwire.ids import ContextId, WorkerId
from gradwire.rpc.behavior import Behavior, Translated
from gradwire.rpc.calls.completions import Completions
from gradwire.rpc.calls.futures import Environment, Future, PendingResult, ResultOrError
from gradwire.rpc.codec.body import BodyCodec, DecodedBody, EncodedBody, Taken, cut_tensors
from gradwire.rpc.codec.tensors_of import depth_of
from gradwire.rpc.expose.names import unversioned
from gradwire.rpc.graph_cut import warn_of_cut
from gradwire.rpc.messages import BackwardFrom, Call, Fetch, Kept, Result, ValueReady
from gradwire.rpc.profiling import call_name, fetch_span
from gradwire.rpc.recompute.checkpoint_run import CheckpointedCall, CheckpointRun, waiting
from gradwire.rpc.refs.handles_state import RefHandle
from gradwire.rpc.refs.refs import Refs
from gradwire.torch_private import has_modes, is_profiled, span
from gradwire.wire.message import Message

_CALLS_BETWEEN_READS = 16
"""Of calls that are made one after another without waiting; see `ChannelReaders.read_some`."""
T = TypeVar("T")
EndSpan = Callable[[str], None] | None
InContext = ContextId | None
"""the context that a call is made in, if any"""


class Target(msgspec.Struct, frozen=True):
    """A function and its arguments. See Note [How a call names its function], rpc/messages.py."""

    name: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    description: str = ""
    """replaces the name in errors and warnings, if set"""
    device_map: dict[str, str] | None = None
    """on which devices of the callee tensors arrive, for this call"""
    wrap: Callable[[Call], Message] | None = None
    """of a method of an actor: puts the call into the message that is sent"""
    opened: Callable[[Any], object] | None = None
    """makes what the future of this call has of what it was answered with"""
    encode: Callable[..., EncodedBody] = BodyCodec.encode
    """encodes the arguments; those for several workers once, see codec/encoded_once.py"""


@lru_cache(1 << 10)
def display_name(name: str) -> str:
    """The name of a function in errors and warnings."""
    return unversioned(name).replace(":", ".").lstrip(".!")


class SentCall(Pending, eq=False, kw_only=True):
    """A call under way, which owns all that has to be undone if it is interrupted."""

    context: InContext = None
    handle: RefHandle | None = None
    """the reference to its result, if the peer keeps that"""
    packed: EncodedBody | None = None
    """what it carries, until it has left"""
    checkpointed: CheckpointedCall | None = None
    """its record, if it is made inside of an activation checkpoint"""
    end_span: EndSpan = None
    """ends its OpenTelemetry span, if it has one; see seeing/otel.py"""


class Created(NamedTuple):
    """A reference to the result of a call that may still run, and the answer to that call."""

    handle: RefHandle
    answer: Promise[Outcome]
    is_profiled: bool = False


# A method of Calls that makes a call.
Make = Callable[["Calls", WorkerId, Target, float], T]


def _profiled(kind: str) -> Callable[[Make[T]], Make[T]]:
    """Show the calls that a method makes as ranges in a profile, if one is taken."""

    def wrap(make: Make[T]) -> Make[T]:
        def profiled(self: Calls, to: WorkerId, target: Target, deadline: float) -> T:
            if not is_profiled():
                return make(self, to, target, deadline)
            directory, profiled_call = self._agent.directory, self._behavior.profiled_call
            name = call_name(kind, target.name, directory.me.name, directory.name(to))
            with span("%s", name):
                if profiled_call is None:
                    return make(self, to, target, deadline)
                made: T = profiled_call(kind, name, partial(make, self), to, target, deadline)
                return made

        return profiled

    return wrap


@final
class Calls:
    """Makes the calls, fetches and remote backwards of one worker."""

    def __init__(
        self,
        agent: Agent,
        engine: Engine,
        refs: Refs,
        bodies: BodyCodec,
        behavior: Behavior,
        device_maps: Mapping[str, Mapping[Any, Any]],
    ) -> None:
        self._device_maps = {to: checked_map(given, to) for to, given in device_maps.items()}
        self._agent, self._engine, self._refs = agent, engine, refs
        self._bodies, self._behavior, self._unawaited = bodies, behavior, count(1)
        self._carries_modes = behavior.carries_modes
        self._tells_of_cancels = not behavior.runs_what_is_late
        completions, of_callback = Completions(agent), behavior.of_callback
        self._environment = Environment(agent, completions, refs.on_death, of_callback)
        agent.kinds.add(Result)
        agent.kinds.add(ValueReady)
        agent.on_answer(Result, attrgetter("body.released"), self._result_came, self._release_late)

    @_profiled("sync")
    def call(self, to: WorkerId, target: Target, deadline: float) -> Any:  # noqa: ANN401
        """What a function returns or raises on a peer. hot: each rpc_sync, so no future is made"""
        sent = SentCall(to, "", 0.0, deadline, Promise())
        try:
            self._send(sent, target)
            context = sent.context
            if context is not None:
                self._engine.called(context, to)
            if sent.checkpointed is None:
                outcome = self._agent.wait_for(to, sent.promise)
            else:
                with sent.checkpointed.run.waiting():
                    outcome = self._agent.wait_for(to, sent.promise)
            if not isinstance(outcome, Exception):
                recorded = self._carries_modes or is_grad_enabled()
                unpacked = self._unpack_result(outcome, to, context, recorded)
        except BaseException:
            self._undo(sent)
            raise
        if isinstance(outcome, Exception):
            raise fresh(self._behavior.of_call(outcome, self._agent.directory))
        if unpacked.depth:
            lift_this_thread(unpacked.depth)
        if (unpacked.cut or unpacked.copies) and is_grad_enabled():
            what = self._name_on(to, target.description or target.name)
            warn_of_cut(unpacked.cut, f"the result of {what}", unpacked.copies, source=to)
        return unpacked.value

    def _give_up(self, promise: Promise[Outcome], peer: WorkerId, context: InContext) -> None:
        """The thread that waits was interrupted; an answer may be there, with references in it."""
        self._agent.cancel(promise, "the thread that waited for it was interrupted")
        pending = self._pending(promise, peer, context, str, self._behavior.of_call)

        def drop(outcome: Outcome) -> None:
            # Unpacked though nobody waits for it, so that these references are dropped.
            if isinstance(outcome, Answer) and not outcome.is_taken:
                self._agent.dispatch.service.submit(pending.unpacked)

        promise.on_settled(drop)

    @_profiled("async")
    def call_async(self, to: WorkerId, target: Target, deadline: float) -> Future[Any]:
        """Run a function on a peer; a future of what it returns."""
        sent = SentCall(to, "", 0.0, deadline, Promise())
        try:
            self._send_unawaited(sent, target)
            what = partial(self._name_on, to, target.description or target.name)
            pending = self._pending(sent.promise, to, sent.context, what, self._behavior.of_call)
            if target.opened is not None:
                pending.pass_through(target.opened)
            return Future(pending, self._environment, to)
        except BaseException:
            self._undo(sent)
            raise

    def _name_on(self, to: WorkerId, name: str) -> str:
        return f"{display_name(name)} on {self._agent.directory.name(to)}"

    def failed(self, error: Exception) -> Future[Any]:
        """The future of a call that could not be sent."""
        promise: Promise[ResultOrError] = Promise()
        promise.settle(error)
        return Future(PendingResult(promise), self._environment)

    def lift_above(self, value: object) -> None:
        """Raise this thread's sequence numbers above the depth of another thread's value."""
        lift_this_thread(depth_of(value))

    @_profiled("remote")
    def remote(self, to: WorkerId, target: Target, deadline: float) -> Created:
        """Run a function on a peer that keeps the result; a reference to it."""
        sent, refs = SentCall(to, "", 0.0, deadline, Promise()), self._refs
        try:
            here = to == self._agent.directory.me.id
            handle = sent.handle = refs.keep_here() if here else refs.keep_elsewhere(to)
            self._send_unawaited(sent, target)
            if handle.fork is not None:
                sent.promise.on_settled(partial(self._refs.creation_ended, handle.fork))
            return Created(handle, sent.promise)
        except BaseException:
            self._undo(sent)
            raise

    def fetch(self, handle: RefHandle, deadline: float) -> Any:  # noqa: ANN401
        """A copy of a value that another worker owns."""
        directory, owner = self._agent.directory, handle.owner
        promise = context = None
        with fetch_span(directory.me.name, directory.name(owner)):
            try:
                with waiting():  # in a checkpoint, remote() is answered after the function returned
                    self._refs.wait_until_counted(handle, deadline)
                    context = self._engine.calling(current_context(), owner)
                    seconds, maps = deadline - self._agent.clock.now(), self._device_map_to(owner)
                    message = Fetch(handle.ref, context, seconds, maps)
                    what, phase = f"fetch of {handle.ref}", "call" if context is None else "forward"
                    promise = self._request(owner, message, deadline, what, phase)
                    self._engine.called(context, owner)
                    name = partial(self._name_on, owner, what)
                    pending = self._pending(promise, owner, context, name, self._behavior.of_fetch)
                    self._agent.wait_for(owner, promise)
                return pending.value()
            except BaseException:
                if promise is not None:
                    self._give_up(promise, owner, context)
                raise

    def _request(
        self, owner: WorkerId, message: Message, deadline: float, what: str, phase: str
    ) -> Promise[Outcome]:
        return self._agent.request(
            owner,
            message,
            deadline=deadline,
            description=what,
            phase=phase,
            inbound=current_inbound(),
            notify_cancel=self._tells_of_cancels,
        )[1]

    def backward_from(
        self, handle: RefHandle, context: ContextId, *, retain_graph: bool, deadline: float
    ) -> None:
        """Run `backward(context, [value])` on the owner of the value."""
        self._refs.wait_until_counted(handle, deadline)
        self._engine.calling(self._engine.contexts.find(context).id, handle.owner)
        seconds, what = deadline - self._agent.clock.now(), f"backward from {handle.ref}"
        message = BackwardFrom(handle.ref, context, retain_graph, seconds, current_modes())
        promise = self._request(handle.owner, message, deadline, what, "backward")
        try:
            outcome = self._agent.wait_for(handle.owner, promise)
        except BaseException:
            self._give_up(promise, handle.owner, None)
            raise
        if isinstance(outcome, Exception):
            raise fresh(self._behavior.of_call(outcome, self._agent.directory))

    def _send_unawaited(self, sent: SentCall, target: Target) -> None:
        """Send a call that this thread does not wait for."""
        # Before the call is sent: nobody waits for it if this is interrupted, by Ctrl-C.
        if not next(self._unawaited) % _CALLS_BETWEEN_READS:
            self._agent.read_some(sent.peer)
        self._send(sent, target)
        self._engine.called(sent.context, sent.peer)

    def _send(self, sent: SentCall, target: Target) -> None:
        """Encode and send a call; if this raises, the caller undoes it. hot: each call"""
        _, _, sent.inbound, run, entered = get_current()
        to, deadline, agent, context = sent.peer, sent.deadline, self._agent, None
        if entered is not None:
            sent.phase, context = "forward", self._engine.calling(current_context(), to)
            sent.context = context
        name, value, maps = target.name, (target.args, target.kwargs), target.device_map
        if run is not None:
            sent.checkpointed = cast(CheckpointRun, run).calling((to, name))
        if maps is None and self._device_maps:
            maps = self._device_map_to(to)
        packed = target.encode(self._bodies, value, to, context, ("args", "kwargs"), deadline, maps)
        sent.packed, body, payload = packed, packed.body, packed.payload
        headers = body.tensors
        size = EACH + len(body.data) + (sum(map(len, payload)) if payload else 0)
        what = sent.description = target.description or display_name(name)
        grad, carries = is_grad_enabled(), self._carries_modes
        in_pass = context is not None and is_in_pass(sent.inbound)
        if grad and (packed.copies or (headers and cut_tensors(headers, body.crossings))):
            self._warn_of_cut(packed, what, to)
        if not agent.window.maybe_count(sent, size):
            self._wait(sent, size)
        inference, record = carries and is_inference_mode_enabled(), sent.checkpointed
        modes = current_modes(autocast=carries) if has_modes() else None
        depth, room = OUTERMOST if type(deadline) is float else extent_of(deadline)
        now, handle = agent.clock.now(), sent.handle
        keep = None if handle is None else Kept(handle.ref, handle.fork)
        rest = (deadline - now, keep, record and record.draws, modes, depth, room, maps, in_pass)
        sent.opened, sent.notify_cancel = now, keep is None and self._tells_of_cancels
        call = Call(name, body, context, grad or not carries, inference, *rest)
        if (observer := agent.events.observer) is not None:
            call = observer.call_leaves(sent, call)
        agent.issue(sent, call if target.wrap is None else target.wrap(call), payload)
        sent.packed = None
        if body.released:
            self._engine.releases.rode(to, body.released)
        if record is not None:
            record.sent(sent.promise, agent)

    def _undo(self, sent: SentCall) -> None:
        """A call could not be sent, or the thread was interrupted: leave nothing of it here."""
        handle, promise, peer = sent.handle, sent.promise, sent.peer
        if sent.has_left:
            self._give_up(promise, peer, sent.context)
            if handle is not None:
                self._refs.creation_abandoned(handle, promise)
            return
        self._agent.window.uncount(sent, self._agent.ends.unsent)
        if sent.end_span is not None:
            sent.end_span("unsent")
        if sent.packed is not None:
            self._bodies.undo(sent.packed, peer)
        if sent.checkpointed is not None:
            sent.checkpointed.recorded.failed()
        if handle is not None:
            self._refs.creation_undone(handle)

    def _device_map_to(self, to: WorkerId) -> dict[str, str] | None:
        """On which devices of a peer tensors arrive, as the options say."""
        return self._device_maps.get(self._agent.directory.name(to))

    def _warn_of_cut(self, packed: EncodedBody, what: str, to: WorkerId) -> None:
        cut = cut_tensors(packed.body.tensors, packed.body.crossings)
        where = f"the arguments of {what} on {self._agent.directory.name(to)}"
        warn_of_cut(len(cut), where, packed.copies, to=to)

    def _wait(self, sent: SentCall, size: int) -> None:
        """Wait until the window has room.

        A function that a peer has called does not wait: the calls that fill the window may
        themselves wait for that function, on the peer.
        """
        agent = self._agent
        if agent.dispatch.user.runs_this_thread:
            agent.window.count_anyway(sent, size)
        else:
            agent.window.count_when_free(sent, size, agent.clock, agent.ends.unsent)

    def _pending(
        self,
        promise: Promise[Outcome],
        source: WorkerId,
        context: InContext,
        what: Callable[[], str],
        translated: Translated,
    ) -> PendingResult[Any]:
        """The answer, to be unpacked by the thread that first asks for it."""
        unpack = partial(self._unpacked, source, context, is_grad_enabled(), translated)
        return PendingResult(promise, unpack, what)

    def _unpacked(
        self,
        source: WorkerId,
        context: InContext,
        differentiable: bool,
        translated: Translated,
        outcome: Outcome,
    ) -> ResultOrError:
        if isinstance(outcome, Exception):
            return translated(outcome, self._agent.directory)
        recorded = self._carries_modes or differentiable
        unpacked = self._unpack_result(outcome, source, context, recorded, is_handed_over=True)
        if (unpacked.cut or unpacked.copies) and not differentiable:
            return replace(unpacked, cut=0, copies=0)
        return unpacked

    def _unpack_result(
        self,
        answer: Answer,
        peer: WorkerId,
        context: InContext,
        recorded: bool,
        *,
        is_handed_over: bool = False,
    ) -> DecodedBody:
        result = answer.message
        if not isinstance(result, Result):
            raise BadMessage(f"a call was answered by {type(result).__name__}")
        if result.accepted:
            self._refs.piggybacked.answer_arrived(result.accepted, peer)
        unpacked = self._bodies.decode(
            result.body,
            answer.payload,
            source=peer,
            context=context,
            is_recorded=recorded,
            is_handed_over=is_handed_over,
            taken=cast(Taken, answer),
        )
        if result.copies > 0:
            return replace(unpacked, copies=result.copies, source=peer)
        return unpacked

    def _result_came(self, peer: WorkerId, result: Message) -> None:
        """At once: a future may be read much later."""
        assert isinstance(result, Result)
        self._engine.releases.heard(result.body.released, peer)

    def _release_late(self, peer: WorkerId, message: Message) -> None:
        assert isinstance(message, Result)
        self._refs.piggybacked.answer_arrived(message.accepted, peer)
        self._refs.release(message.body.references)
        self._engine.drop_crossings(message.body.crossings, peer)
        self._engine.devices.drop(message.body.tensors, peer)
