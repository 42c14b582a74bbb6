"""Requests that nobody waits for any more: whoever serves them hears it, and stops early.

A request is called off when its deadline has passed, when whoever waited was interrupted, when its
future was cancelled, or when the inbound request that it was made for was itself called off. So it
spreads from worker to worker. What a peer asked for ends too when its connection does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast, final

from gradwire.agent.messages import Cancel
from gradwire.agent.peers.directory import Directory
from gradwire.agent.requests.clock import Clock
from gradwire.agent.requests.state import Taken
from gradwire.agent.serving.dispatch import Dispatch, Lane, Payload
from gradwire.agent.serving.inbound_request import Source
from gradwire.errors import Cancelled, GradwireError
from gradwire.events import Events
from gradwire.ids import CallId
from gradwire.transport.base import Channel
from gradwire.wire.frame import Frame
from gradwire.wire.message import encode, kind_of

_SECONDS = 10.0


@final
class Cancelling:
    """Of one worker; `nested` takes the requests made for an inbound request out of the agent's
    table.
    """

    def __init__(
        self,
        directory: Directory,
        dispatch: Dispatch,
        clock: Clock,
        events: Events,
        nested: Callable[[Source], list[Taken]],
    ) -> None:
        self._directory, self._dispatch = directory, dispatch
        self._clock, self._events, self._nested = clock, events, nested
        dispatch.handle(Cancel, self._serve, Lane.CONTROL)

    def call_off(self, requests: list[Taken], why: str) -> None:
        """End these requests of ours, here and where they are served."""
        for n, pending, _ in requests:
            name, call = self._directory.name(pending.peer), CallId(self._directory.me.id, n)
            error = Cancelled(f"{call} ({pending.what}) on {name} was called off: {why}")
            pending.slot.settle(error.about(name, phase=pending.phase))
        self.tell(requests)

    def tell(self, requests: list[Taken]) -> None:
        """They have ended here: those who serve them may stop."""
        ended: dict[Channel, list[int]] = {}
        for n, pending, via in requests:
            if pending.tells and via is not None:
                ended.setdefault(cast(Channel, via), []).append(n)
        for channel, numbers in ended.items():
            self._dispatch.service.submit(partial(self._send, channel, numbers))

    def stop(self, inbound_requests: list[Source], why: str) -> None:
        """Nobody waits for these any more, which we serve."""
        for inbound in inbound_requests:
            inbound.cancelled = why
            self._events.emit("cancel", CallId(inbound.worker, inbound.request))
            self.call_off(self._nested(inbound), why)

    def _send(self, channel: Channel, requests: list[int]) -> None:
        frame = Frame(kind_of(Cancel), 0, 0, encode(Cancel(requests)), ())
        try:
            channel.send(frame, self._clock.now() + _SECONDS)
        except GradwireError:
            self._events.emit("uncancelled", str(requests))

    def _serve(self, message: Cancel, _: Payload, source: Source) -> None:
        name = self._directory.name(source.worker)
        inbound_requests = self._dispatch.inbound_requests.asked_by(
            source.worker, source.channel, message.requests
        )
        self.stop(inbound_requests, f"{name} does not wait for it any more")
