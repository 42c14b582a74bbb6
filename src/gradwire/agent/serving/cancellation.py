"""Cancellation of requests that nobody waits for any more: the worker that serves one stops early.

A request is cancelled when its deadline has passed, when the waiting thread was interrupted, when
its future was cancelled, or when the inbound request that it was made for was itself cancelled. So
cancellation spreads from worker to worker. Inbound requests are cancelled too when their connection
ends. One that has not begun is dropped. One that runs cannot be stopped from outside: it is marked,
and its next use of gradwire raises.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast, final

from gradwire.agent.messages import Cancel
from gradwire.agent.peers.directory import Directory
from gradwire.agent.requests.promise import Pending
from gradwire.agent.requests.timer import Clock
from gradwire.agent.serving.dispatch import Dispatch, Lane, Payload, Source
from gradwire.errors import GradwireError
from gradwire.events import Events
from gradwire.ids import CallId
from gradwire.transport.base import Channel
from gradwire.wire.message import Frame, encode, kind_of

_SECONDS = 10.0


@final
class Cancellation:
    """Cancels outbound and inbound requests of one worker.

    `nested` takes the requests made for inbound requests out of the agent's table.
    """

    def __init__(
        self,
        directory: Directory,
        dispatch: Dispatch,
        clock: Clock,
        events: Events,
        nested: Callable[[set[Source]], list[Pending]],
    ) -> None:
        self._directory, self._dispatch = directory, dispatch
        self._clock, self._events, self._nested = clock, events, nested
        dispatch.handle(Cancel, self._serve, Lane.CONTROL)

    def cancel(self, requests: list[Pending], why: str) -> None:
        """Fail these requests with Cancelled, and notify the peers that serve them."""
        for pending in requests:
            name = self._directory.name(pending.peer)
            pending.promise.settle(pending.cancelled(name, self._directory.me.id, why))
        self.notify(requests)

    def notify(self, requests: list[Pending]) -> None:
        """Send a Cancel to the workers that serve these requests, which have ended here."""
        ended: dict[Channel, list[int]] = {}
        for pending in requests:
            if pending.notify_cancel and pending.via is not None:
                ended.setdefault(cast(Channel, pending.via), []).append(pending.n)
        for channel, numbers in ended.items():
            self._dispatch.service.submit(partial(self._send, channel, numbers))

    def stop(self, inbound_requests: list[Source], why: str) -> None:
        """Mark inbound requests as cancelled, and cancel the requests that were made for them."""
        for inbound in inbound_requests:
            inbound.cancelled = why
            self._events.emit("cancel", CallId(inbound.worker, inbound.request))
        self.cancel(self._nested(set(inbound_requests)), why)

    def _send(self, channel: Channel, requests: list[int]) -> None:
        frame = Frame(kind_of(Cancel), 0, 0, encode(Cancel(requests)), ())
        try:
            channel.send(frame, self._clock.now() + _SECONDS)
        except GradwireError:
            self._events.emit("uncancelled", str(requests))

    def _serve(self, message: Cancel, _: Payload, source: Source) -> None:
        name, requests = self._directory.name(source.worker), set(message.requests)
        is_open = self._dispatch.inbound_on(source.channel)
        cancelled = [inbound for inbound in is_open if inbound.request in requests]
        self.stop(cancelled, f"{name} does not wait for it any more")
