"""A call, on the worker that makes it: encode, send, wait. The callee's side is server.py.

docs/concepts/calls.md lists the functions that a call goes through on both workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import count
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast, final

import msgspec
from msgspec.structs import replace
from torch import is_grad_enabled, is_inference_mode_enabled

from gradwire.agent.agent import Agent, Answer, Outcome
from gradwire.agent.devices.maps import checked_map
from gradwire.agent.remote_errors import fresh
from gradwire.agent.requests.promise import Promise
from gradwire.agent.requests.timer import OUTERMOST, Clock, extent_of, nested
from gradwire.agent.serving.peer_limits import EACH, PeerLimit
from gradwire.autograd.backward.engine_run import is_in_pass
from gradwire.autograd.engine import Engine
from gradwire.autograd.graph.walk import lift_this_thread
from gradwire.autograd.modes import current_modes
from gradwire.autograd.scope import current_context
from gradwire.current import current_inbound, get_current
from gradwire.errors import ArgumentTypeError, BadMessage, CallTimeout, Cancelled, UsageError
from gradwire.ids import CallId, ContextId, WorkerId
from gradwire.options import DEFAULT, FOREVER, Timeout
from gradwire.rpc.behavior import Behavior, Translated
from gradwire.rpc.calls.completions import Completions
from gradwire.rpc.calls.futures import Environment, Future, PendingResult, ResultOrError
from gradwire.rpc.codec.body import BodyCodec, DecodedBody, EncodedBody, cut_tensors, depth_of
from gradwire.rpc.graph_cut import warn_of_cut
from gradwire.rpc.messages import BackwardFrom, Call, Fetch, Kept, Result, ValueReady
from gradwire.rpc.profiling import call_span, fetch_span
from gradwire.rpc.recompute.checkpoint_run import CheckpointedCall, CheckpointRun, waiting
from gradwire.rpc.refs.handles_state import RefHandle
from gradwire.rpc.refs.refs import Refs
from gradwire.torch_private import has_modes, is_profiled
from gradwire.wire.message import Message

_CALLS_BETWEEN_READS = 16
"""Of calls that are made one after another without waiting; see `ChannelReaders.read_some`."""
T = TypeVar("T")
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


@lru_cache(1 << 10)
def display_name(name: str) -> str:
    """The name of a function in errors and warnings."""
    return name.replace(":", ".").lstrip(".!")


class SentCall(msgspec.Struct, frozen=True):
    """A call that was sent and is not answered yet."""

    call: CallId
    promise: Promise[Outcome]
    size: int
    """its bytes in the flow-control window"""
    context: InContext
    checkpointed: CheckpointedCall | None
    """its record, if it is made inside of an activation checkpoint"""


class Created(NamedTuple):
    """A reference to the result of a call that may still run, and the answer to that call."""

    handle: RefHandle
    answer: Promise[Outcome]


# A method of Calls that makes a call.
Make = Callable[["Calls", WorkerId, Target, float], T]


def _profiled(kind: str) -> Callable[[Make[T]], Make[T]]:
    """Show the calls that a method makes as ranges in a profile, if one is taken."""

    def wrap(make: Make[T]) -> Make[T]:
        def profiled(self: Calls, to: WorkerId, target: Target, deadline: float) -> T:
            if not is_profiled():
                return make(self, to, target, deadline)
            directory = self._agent.directory
            with call_span(kind, target.name, directory.me.name, directory.name(to)):
                return make(self, to, target, deadline)

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
        self._carries_modes, self._events = behavior.carries_modes, agent.events
        self._tells_of_cancels = not behavior.runs_what_is_late
        self._window = PeerLimit("in_flight", agent.limits.in_flight, one_may_exceed=True)
        agent.locks.add(self._window.lock)
        completions, of_callback = Completions(agent), behavior.of_callback
        self._environment = Environment(agent, completions, refs.on_death, of_callback)
        agent.kinds.add(Result)
        agent.kinds.add(ValueReady)
        agent.on_answer(Result, attrgetter("body.released"), self._result_came, self._release_late)

    @_profiled("sync")
    def call(self, to: WorkerId, target: Target, deadline: float) -> Any:  # noqa: ANN401
        """What a function returns or raises on a peer. hot: each rpc_sync, so no future is made"""
        sent = self._send_call(to, target, deadline, None)
        context = sent.context
        try:
            if context is not None or self._events.listeners:
                self._after_send(sent, to)
            if sent.checkpointed is None:
                outcome = self._outcome(sent.promise, to, context)
            else:
                with sent.checkpointed.run.waiting():
                    outcome = self._outcome(sent.promise, to, context)
        finally:
            self._window.give_back(to, sent.size)
        if isinstance(outcome, Exception):
            raise fresh(self._behavior.of_call(outcome, self._agent.directory))
        recorded = self._carries_modes or is_grad_enabled()
        unpacked = self._unpack_result(outcome, to, context, recorded)
        if unpacked.depth:
            lift_this_thread(unpacked.depth)
        if (unpacked.cut or unpacked.copies) and is_grad_enabled():
            what = self._name_on(to, target.description or target.name)
            warn_of_cut(unpacked.cut, f"the result of {what}", unpacked.copies)
        return unpacked.value

    def _outcome(self, promise: Promise[Outcome], peer: WorkerId, context: InContext) -> Outcome:
        """Wait for an answer."""
        try:
            return self._agent.wait_for(peer, promise)
        except BaseException:  # interrupted; an answer may still come, with references in it
            self._agent.cancel(promise, "the thread that waited for it was interrupted")
            pending = self._pending(promise, peer, context, str, self._behavior.of_call)
            # Unpacked though nobody waits for it, so that these references are dropped.
            promise.on_settled(lambda _: self._agent.dispatch.service.submit(pending.unpacked))
            raise

    @_profiled("async")
    def call_async(self, to: WorkerId, target: Target, deadline: float) -> Future[Any]:
        """Run a function on a peer; a future of what it returns."""
        sent = self._send_unawaited(to, target, deadline, None)
        what = partial(self._name_on, to, target.description or target.name)
        pending = self._pending(sent.promise, to, sent.context, what, self._behavior.of_call)
        return Future(pending, self._environment, to)

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
        here = to == self._agent.directory.me.id
        handle = self._refs.keep_here() if here else self._refs.keep_elsewhere(to)
        try:
            keep = Kept(handle.ref, handle.fork)
            promise = self._send_unawaited(to, target, deadline, keep).promise
        except BaseException:
            self._refs.creation_undone(handle)
            raise
        if handle.fork is not None:
            promise.on_settled(partial(self._refs.creation_ended, handle.fork))
        return Created(handle, promise)

    def fetch(self, handle: RefHandle, deadline: float) -> Any:  # noqa: ANN401
        """A copy of a value that another worker owns."""
        directory, owner = self._agent.directory, handle.owner
        with fetch_span(directory.me.name, directory.name(owner)):
            with waiting():  # in a checkpoint, remote() is answered after the function has returned
                self._refs.wait_until_counted(handle, deadline)
                context = self._engine.calling(current_context(), owner)
                seconds, maps = deadline - self._agent.clock.now(), self._device_map_to(owner)
                message = Fetch(handle.ref, context, seconds, maps)
                what, phase = f"fetch of {handle.ref}", "call" if context is None else "forward"
                promise = self._request(owner, message, deadline, what, phase)
                self._engine.called(context, owner)
                name = partial(self._name_on, owner, what)
                pending = self._pending(promise, owner, context, name, self._behavior.of_fetch)
                self._outcome(promise, owner, context)
            return pending.value()

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
        outcome = self._outcome(promise, handle.owner, None)
        if isinstance(outcome, Exception):
            raise fresh(self._behavior.of_call(outcome, self._agent.directory))

    def _send_unawaited(
        self, to: WorkerId, target: Target, deadline: float, keep: Kept | None
    ) -> SentCall:
        """Send a call that this thread does not wait for; its answer releases its bytes."""
        # Before the call is sent: if this is interrupted, by Ctrl-C, nobody would drop its value.
        if not next(self._unawaited) % _CALLS_BETWEEN_READS:
            self._agent.read_some(to)
        sent = self._send_call(to, target, deadline, keep)
        sent.promise.on_settled(partial(self._window.give_back, to, sent.size))
        if sent.context is not None or self._events.listeners:
            self._after_send(sent, to)
        return sent

    def _send_call(
        self, to: WorkerId, target: Target, deadline: float, keep: Kept | None
    ) -> SentCall:
        """Encode and send a call; the caller gives its bytes back to the window. hot: each call"""
        _, _, inbound, run, entered = get_current()
        context = None if entered is None else self._engine.calling(current_context(), to)
        name, value, maps = target.name, (target.args, target.kwargs), target.device_map
        record = None if run is None else cast(CheckpointRun, run).calling((to, name))
        if maps is None and self._device_maps:
            maps = self._device_map_to(to)
        packed = self._bodies.encode(value, to, context, ("args", "kwargs"), deadline, maps)
        body, payload, headers, counted = packed.body, packed.payload, packed.body.tensors, False
        size = EACH + len(body.data) + (sum(map(len, payload)) if payload else 0)
        what = target.description or display_name(name)
        try:
            grad, carries = is_grad_enabled(), self._carries_modes
            in_pass = context is not None and is_in_pass(inbound)
            if grad and (packed.copies or (headers and cut_tensors(headers, body.crossings))):
                self._warn_of_cut(packed, what, to)
            counted = self._window.maybe_take(to, size) or self._wait(to, size, deadline, what)
            inference, draws = carries and is_inference_mode_enabled(), record and record.draws
            modes = current_modes(autocast=carries) if has_modes() else None
            depth, room = OUTERMOST if type(deadline) is float else extent_of(deadline)
            rest = (deadline - self._agent.clock.now(), keep, draws, modes, depth, room, maps)
            id, promise = self._agent.request(
                to,
                Call(name, body, context, grad or not carries, inference, *rest, in_pass),
                payload,
                deadline=deadline,
                description=what,
                phase="call" if context is None else "forward",
                inbound=inbound,
                notify_cancel=keep is None and self._tells_of_cancels,
            )
        except BaseException:
            self._undo_send(to, size if counted else 0, packed, record)
            raise
        if body.released:
            self._engine.releases.rode(to, body.released)
        recorded = record and record.sent(promise, self._agent)
        return SentCall(id, promise, size, context, recorded)

    def _device_map_to(self, to: WorkerId) -> dict[str, str] | None:
        """On which devices of a peer tensors arrive, as the options say."""
        return self._device_maps.get(self._agent.directory.name(to))

    def _warn_of_cut(self, packed: EncodedBody, what: str, to: WorkerId) -> None:
        cut = cut_tensors(packed.body.tensors, packed.body.crossings)
        where = f"the arguments of {what} on {self._agent.directory.name(to)}"
        warn_of_cut(len(cut), where, packed.copies)

    def _undo_send(
        self, to: WorkerId, size: int, packed: EncodedBody, checkpointed: CheckpointedCall | None
    ) -> None:
        if size:  # it was taken from the window
            self._window.give_back(to, size)
        self._bodies.undo(packed, to)
        if checkpointed is not None:
            checkpointed.recorded.failed()

    def _wait(self, to: WorkerId, size: int, deadline: float, what: str) -> bool:
        """Wait until the window has room.

        A function that a peer has called does not wait: the calls that fill the window may
        themselves wait for that function, on the peer.
        """
        if self._agent.dispatch.user.runs_this_thread:
            self._window.take_anyway(to, size)
        else:
            self._window.take_when_free(to, size, deadline, self._agent.clock, what)
        return True

    def _after_send(self, sent: SentCall, to: WorkerId) -> None:
        self._engine.called(sent.context, to)
        if self._events.listeners:
            self._events.emit("call", sent.call, self._agent.directory.name(to))

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
        )
        return replace(unpacked, copies=result.copies) if result.copies > 0 else unpacked

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


Deadline = Callable[[Timeout], float]
"""`deadline_from` with the clock and the default of one worker"""


def _seconds(timeout: object) -> float:
    """As a float: numpy's numbers are not sent. hot: each call with a timeout"""
    if type(timeout) is float:
        return timeout
    try:
        return float(timeout)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"timeout={timeout!r:.80} is not a number of seconds",
            hint="timeout=None waits as long as the other worker lives",
        ) from error


def deadline_from(clock: Clock, default: float, timeout: Timeout) -> float:
    """The deadline of a wait that begins now; never later than that of the call being served.

    Raises CallTimeout if that one has passed, Cancelled if the call was cancelled. hot: each call
    """
    if timeout is DEFAULT:
        seconds = default
    else:
        seconds = FOREVER if timeout is None else min(_seconds(timeout), FOREVER)
        if not seconds > 0:
            raise UsageError(
                f"timeout={timeout!r} is not a positive number of seconds",
                hint="timeout=None waits as long as the other worker lives",
            )
    now = clock.now()
    _, due, inbound, _, _ = get_current()
    if inbound is not None and inbound.cancelled:
        raise Cancelled(f"the enclosing call was cancelled: {inbound.cancelled}")
    if due == inf:
        return now + seconds
    if due <= now:
        raise CallTimeout("the deadline of the enclosing call has passed")
    return nested(due, now, seconds)
