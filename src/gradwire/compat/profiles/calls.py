"""Calls of a thread that is profiled: the function is profiled too, and its events come back.

The answer to rpc_sync and rpc_async is a pair of the value and the events. The value that `remote`
makes stays where it is, so its events are sent by a call of their own before it counts as made.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, final

from msgspec.structs import replace

from gradwire.autograd.scope import inside
from gradwire.compat.profiles.events import pack_events
from gradwire.compat.profiles.recording import NotedCall, Wishes, maybe_recording
from gradwire.compat.profiles.served import run_recorded
from gradwire.current import current_inbound, current_worker
from gradwire.errors import BadMessage, GradwireError
from gradwire.ids import WorkerId
from gradwire.rpc.calls.client import Target
from gradwire.rpc.expose.async_execution import Later
from gradwire.rpc.worker import Worker

_MOST_AWAITED = 1 << 12
"""calls by `remote` whose events may be under way; of more, the oldest are not waited for"""
_log = logging.getLogger("gradwire")


class Destination(NamedTuple):
    """Where the events of a value that stays elsewhere are sent, and under what number."""

    to: WorkerId
    number: int


@final
class AwaitedEvents:
    """The profiled calls by `remote` of one worker whose events have not come."""

    def __init__(self, _: Worker) -> None:
        self._lock, self._made = Lock(), 0
        self._calls: OrderedDict[tuple[WorkerId, int], NotedCall] = OrderedDict()

    def expect(self, call: NotedCall) -> int:
        """The number under which the events of a call come."""
        with self._lock:
            self._made += 1
            self._calls[call.to, self._made] = call
            if len(self._calls) > _MOST_AWAITED:
                self._calls.popitem(last=False)
            return self._made

    def came(self, source: WorkerId, number: int, data: object) -> None:
        """Take what the worker that was called has sent; what nobody awaits is dropped."""
        with self._lock:
            call = self._calls.pop((source, number), None)
        if call is not None:
            call.answered(data)


# -- on the caller


def call_profiled(
    kind: str,
    key: str,
    make: Callable[[WorkerId, Target, float], Any],
    to: WorkerId,
    target: Target,
    deadline: float,
) -> Any:  # noqa: ANN401
    """Make a call of a thread that is profiled; ask for the events, if its profile takes them."""
    recording = maybe_recording()
    if recording is None:
        return make(to, target, deadline)
    call, home, opened = recording.calling(key, to), None, None
    if kind == "remote":
        worker = current_worker.find()
        home = Destination(worker.directory.me.id, worker.part(AwaitedEvents).expect(call))
    elif kind == "async":
        opened = partial(_opened, call)
    args = (run_profiled, recording.wishes, home, *target.args)
    made = make(to, replace(target, args=args, opened=opened), deadline)
    if kind == "sync":
        return _opened(call, made)
    return made._replace(is_profiled=True) if kind == "remote" else made


def _opened(call: NotedCall, answer: object) -> object:
    """The value alone; the events are kept with the call."""
    match answer:
        case (value, bytes() as data):
            call.answered(data)
            return value
        case _:
            raise BadMessage(f"{call.key} was answered without the events that it asked for")


# -- on the callee; these two are sent by name


def run_profiled(
    wishes: Wishes,
    home: Destination | None,
    function: Callable[..., object],
    /,
    *args: object,
    **kwargs: object,
) -> object:
    """Run a function with the profiler on; its result and the events, or where these are sent."""
    worker = current_worker.find()
    value, events = run_recorded(worker, Wishes(*map(bool, wishes)), function, *args, **kwargs)

    def told() -> bytes:
        return pack_events(events())

    if home is None:
        if type(value) is Later:
            return value._replace(finish=lambda result: (result, told()))
        return value, told()
    if type(value) is Later:
        return value._replace(finish=partial(_send_later, worker, home, told))
    with inside(None):
        try:
            worker.calls.call(home.to, _sending(home, told()), worker.deadline(None))
        except GradwireError:  # the value is there all the same
            _log.warning("the events of a profiled call were not sent", exc_info=True)
    return value


def _send_later(
    worker: Worker, home: Destination, told: Callable[[], bytes], value: object
) -> object:
    """Not waited for: the thread that completes a future may be one that reads a channel."""
    with worker.scope(), inside(None):
        worker.calls.call_async(home.to, _sending(home, told()), worker.deadline(None))
    return value


def _sending(home: Destination, data: bytes) -> Target:
    return Target(f"!{take_events.__name__}", (take_events, home.number, data), {})


def take_events(number: int, data: bytes) -> None:
    """Runs on the worker that made a call by `remote`."""
    worker = current_worker.find()
    worker.part(AwaitedEvents).came(current_inbound().worker, number, data)
