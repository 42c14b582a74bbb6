"""Tells peers that nobody waits for the answers to these requests any more."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, cast

from gradwire.agent.messages import Cancel
from gradwire.agent.requests.promise import Pending
from gradwire.agent.requests.timer import Clock
from gradwire.agent.serving.thread_pool import ElasticPool
from gradwire.errors import GradwireError
from gradwire.events import Events
from gradwire.options import Limits
from gradwire.transport.base import Channel
from gradwire.wire.message import make_frame

SECONDS: Final = 10.0
"""to send a Cancel or a Failure; the peer that waits has a deadline of its own"""


def send_cancels(
    requests: Sequence[Pending], pool: ElasticPool, clock: Clock, limits: Limits, events: Events
) -> None:
    """Send a Cancel to the workers that serve these requests, which have ended here."""
    ended: dict[Channel, list[int]] = {}
    for pending in requests:
        if pending.notify_cancel and pending.via is not None:
            ended.setdefault(cast(Channel, pending.via), []).append(pending.n)

    def send(channel: Channel, numbers: list[int]) -> None:
        try:
            channel.send(make_frame(Cancel(numbers), (), limits), clock.now() + SECONDS)
        except GradwireError:
            events.emit("uncancelled", str(numbers))

    for channel, numbers in ended.items():
        pool.submit(partial(send, channel, numbers))
