"""Cancelling requests, here and at the peers that serve them.

Note [Cancellation]: a request is cancelled when its deadline has passed, when the waiting thread
was interrupted, when its future was cancelled, or with the inbound request that it was made for. So
cancellation spreads from worker to worker. Inbound requests are cancelled too when their connection
ends. One that has not begun is dropped. One that runs is marked: its next use of gradwire raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, cast, final

from gradwire.agent.messages import Cancel
from gradwire.agent.peers.directory import Directory
from gradwire.agent.requests.promise import Pending, Promise, RequestTable
from gradwire.agent.requests.timer import Clock
from gradwire.agent.serving.dispatch import Dispatch, Lane, Payload, Source
from gradwire.errors import Cancelled, GradwireError
from gradwire.events import Events
from gradwire.ids import CallId
from gradwire.transport.base import Channel
from gradwire.wire.message import make_frame

SECONDS: Final = 10.0
"""to send a Cancel or a Failure; the peer that waits has a deadline of its own"""


@final
class Cancels:
    """Cancels the requests of one worker, and what it serves for its peers."""

    def __init__(
        self,
        directory: Directory,
        requests: RequestTable,
        settle: Callable[[Pending, Cancelled], None],
        dispatch: Dispatch,
        clock: Clock,
        events: Events,
    ) -> None:
        self._directory, self._requests, self._settle = directory, requests, settle
        self._dispatch, self._clock, self._events = dispatch, clock, events
        dispatch.handle(Cancel, self._serve, Lane.CONTROL)

    def cancel(self, promise: Promise[Any], why: str) -> bool:
        """Cancel a request; False if its answer has come already."""
        pending = self._requests.maybe(promise.request)
        try:
            return self._cancel(self._requests.cancelled(promise.request), why)
        except BaseException:  # a signal handler has raised: as in `Agent._answer_came`
            if pending is not None and pending.n not in self._requests:
                self._cancel([pending], why)
            raise

    def _cancel(self, requests: Sequence[Pending], why: str) -> bool:
        me = self._directory.me.id
        for pending in requests:
            name = self._directory.name(pending.peer)
            self._settle(pending, pending.cancelled(name, me, why))
        self.send(requests)
        return bool(requests)

    def _serve(self, message: Cancel, _: Payload, source: Source) -> None:
        name, requests = self._directory.name(source.worker), set(message.requests)
        is_open = self._dispatch.inbound_on(source.channel)
        cancelled = [inbound for inbound in is_open if inbound.request in requests]
        self.stop(cancelled, f"{name} does not wait for it any more")

    def stop(self, inbound_requests: Iterable[Source], why: str) -> None:
        """Mark inbound requests as cancelled, and cancel the requests that were made for them."""
        for inbound in inbound_requests:
            inbound.cancelled = why
            if (ends := inbound.on_cancelled) is not None:
                ends(why)
            self._events.note("cancel", CallId(inbound.worker, inbound.request), inbound.worker)
        self._cancel(self._requests.made_for(set(inbound_requests)), why)

    def send(self, requests: Sequence[Pending]) -> None:
        """Send a Cancel to the workers that serve these requests, which have ended here."""
        ended: dict[Channel, list[int]] = {}
        for pending in requests:
            if pending.notify_cancel and pending.via is not None:
                ended.setdefault(cast(Channel, pending.via), []).append(pending.n)
        for channel, numbers in ended.items():
            self._dispatch.service.submit(partial(self._send_on, channel, numbers))

    def _send_on(self, channel: Channel, numbers: list[int]) -> None:
        deadline = self._clock.now() + SECONDS
        try:
            channel.send(make_frame(Cancel(numbers), (), self._dispatch.limits), deadline)
        except GradwireError:
            self._events.note("uncancelled", str(numbers))
