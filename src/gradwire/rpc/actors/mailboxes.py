"""Mailboxes: serves the calls of the actors that live on one worker, in their order.

Calls are ordered by the thread that reads them, in the control lane: the threads of a pool would
begin them in any order. What waits has no thread. The handle of an actor says in each call how many
may run at a time, so nothing has to be known of an actor whose value is not made yet.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, final

from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.agent.serving.peer_limits import EACH, PeerLimit, over
from gradwire.ids import RefId
from gradwire.rpc.actors.mailbox_state import MailboxState
from gradwire.rpc.actors.messages import ActorCall
from gradwire.rpc.messages import Call
from gradwire.threads import leave_fork

if TYPE_CHECKING:
    from gradwire.rpc.worker import Worker


class WaitingCall(NamedTuple):
    """A call that has arrived."""

    call: Call
    payload: Payload
    source: Source
    size: int


@final
class Mailboxes:
    """The mailboxes of the actors of one worker; one is there while it has calls."""

    def __init__(self, worker: Worker) -> None:
        self._agent, self._server = worker.agent, worker.server
        self._dispatch = worker.agent.dispatch
        self._unserved = PeerLimit("unserved", self._agent.limits.unserved, one_may_exceed=True)
        self._lock = threading.RLock()  # a finalizer that interrupts its holder may make a call
        self._boxes: dict[RefId, MailboxState[WaitingCall]] = {}
        self._agent.locks.add(self._lock)
        self._agent.locks.add(self._unserved.lock)
        self._agent.handle(ActorCall, self._arrived, Lane.CONTROL)

    def __len__(self) -> int:
        return len(self._boxes)

    def _arrived(self, message: ActorCall, payload: Payload, source: Source) -> None:
        size = EACH + len(message.call.body.data) + len(payload or ())
        if not self._unserved.maybe_take(source.worker, size):
            raise over("unserved", self._agent.limits.unserved)
        self._dispatch.outlasting.add(source)  # so that it can be cancelled
        waiting = WaitingCall(message.call, payload, source, size)
        with self._lock:
            box = self._boxes.setdefault(message.actor, MailboxState())
            box.arrived(waiting, message.most)
        self._dispatch.user.submit(partial(self._serve_one, message.actor))

    def _serve_one(self, actor: RefId) -> None:
        """Serve the next call of an actor, if it is its turn. One job is submitted for each."""
        with self._lock:
            box = self._boxes.get(actor)
            waiting = None if box is None else box.maybe_next()
        if waiting is None:  # the end of one that runs submits another job
            return
        call, payload, source, _ = waiting
        later = None
        try:
            if source.cancelled:
                self._server.cancelled(call, source)
            else:
                later = self._server.serve(call, payload, source)
        except BaseException as error:  # the caller must be told of any failure
            if self._dispatch.is_forked:
                leave_fork(error)
            self._agent.failed(source, error)
        if later is None:
            self._ended(actor, waiting)
        else:
            later.future.add_done_callback(lambda _: self._ended(actor, waiting))

    def _ended(self, actor: RefId, served: WaitingCall) -> None:
        self._dispatch.outlasting.discard(served.source)
        self._unserved.give_back(served.source.worker, served.size)
        with self._lock:
            box = self._boxes[actor]
            others_wait = box.ended()
            if box.is_idle:
                del self._boxes[actor]
        if others_wait:
            self._dispatch.user.submit(partial(self._serve_one, actor))
