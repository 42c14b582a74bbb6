"""The generator of a stream, on the worker that runs it.

Note [No thread for a stream that waits]: a generator keeps its place by itself, so no thread has to
wait in it. The reader's request for items continues it, in the user lane, as a call would run a
function: on a thread of the pool, or on the one that reads if it is quick. When it has made what
may be ahead of the reader, that job ends, and the next request continues it on any thread.
`Suspended` gives it its scope and modes there. So a worker may hold thousands of streams, and
`Options.threads` limits only those that compute.

An item is encoded as soon as it is made, because the generator may change it afterwards. Its edges
exist from then on, and are withdrawn if the item is never sent.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from msgspec.structs import replace

from gradwire.agent.messages import Done, Failure
from gradwire.agent.serving.dispatch import Source
from gradwire.current import current_inbound
from gradwire.errors import BadMessage, Cancelled
from gradwire.rpc.calls.suspended import Suspended
from gradwire.rpc.codec.body import EncodedBody
from gradwire.rpc.streams.messages import Item, Items
from gradwire.rpc.streams.window_state import ProductionState
from gradwire.threads import leave_fork
from gradwire.wire.message import ALIGNMENT

if TYPE_CHECKING:
    from gradwire.rpc.worker import Worker

_MOST_ITEMS: Final = 1 << 10
_MOST_BYTES: Final = 1 << 20
"""of one message; a larger item has one for itself"""
_log = logging.getLogger("gradwire")


class Asker(NamedTuple):
    """A request of the reader that has no answer yet."""

    source: Source
    deadline: float


class ReadyItem(NamedTuple):
    """An item that was made and encoded, but not sent."""

    item: Item
    payload: bytes
    encoded: EncodedBody


@final
class Production:
    """Runs the generator of one stream, and answers its reader."""

    def __init__(
        self, worker: Worker, items: Iterator[Any], ahead: int, lock: threading.RLock
    ) -> None:
        opened: Source = current_inbound()
        self._worker, self._agent, self._bodies = worker, worker.agent, worker.bodies
        self._suspended, self._lock = Suspended(worker), lock
        self._reader, self._channel = opened.worker, opened.channel
        self._device_map = opened.device_map
        self._source = self._new_source()
        self._items: Iterator[Any] | None = items
        self._state = ProductionState(ahead)
        self._ready: deque[ReadyItem] = deque()
        self._asker: Asker | None = None
        self._closers: list[Asker] = []
        self._failure: Failure | None = None
        self._deadline = 0.0

    def _new_source(self) -> Source:
        """Stands for the requests that the generator serves: nested calls are made for it."""
        return Source(self._reader, self._channel, 0)

    # -- what the reader asks for

    def asked(self, read: int, asker: Asker) -> None:
        """The reader has read so many items, and waits for more: send and make them."""
        with self._lock:
            self._state.asked(read)
            self._asker, self._deadline = asker, asker.deadline
            begins = self._state.begins()
        self._answer()  # first: they are on their way while others are made
        if begins:
            self._suspended.variables.run(self._run)

    def end(self, why: str, closer: Asker | None = None) -> None:
        """End the generator where it is; nobody reads on. `closer` is answered when it has ended.

        If it runs now, what it calls is cancelled, and it is ended when it has made its item.
        """
        with self._lock:
            self._state.is_closing = True
            dropped, self._ready = self._ready, deque()
            self._asker = None
            if closer is not None:
                self._closers.append(closer)
            begins, has_ended = self._state.begins(), self._state.has_ended
        for ready in dropped:
            self._bodies.undo(ready.encoded, self._reader)
        if has_ended:
            self._answer_closers()
        elif not begins:
            self._agent.stop_serving([self._source], why)
        if begins:
            self._agent.dispatch.user.submit(partial(self._suspended.variables.run, self._run))

    # -- running the generator

    def _run(self) -> None:
        """Make items while any may be made. One thread at a time: see `ProductionState`."""
        requests = self._agent.dispatch.inbound_requests
        requests.add(self._source)  # so that the loss of the reader cancels what it calls
        try:
            while True:
                with self._lock:
                    goes_on, deadline = self._state.goes_on(), self._deadline
                if not goes_on:
                    return
                if self._state.is_closing:
                    self._close()
                    return
                with self._suspended.scope(deadline, self._source):
                    while self._make_one() and deadline == self._deadline:
                        pass
        finally:
            requests.discard(self._source)

    def _make_one(self) -> bool:
        """Make and encode one item; whether another may be made. hot: each item"""
        items = self._items
        assert items is not None, "it has not ended"
        try:
            item = self._suspended.step(partial(next, items))
            if self._agent.dispatch.is_forked:
                leave_fork(None)
            ready = self._encoded(item)
            del item
        except StopIteration:
            self._ended(None)
            return False
        except BaseException as error:
            if self._agent.dispatch.is_forked:
                leave_fork(error)
            self._failed(items, error)
            return False
        with self._lock:
            self._state.made += 1
            if is_wanted := not self._state.is_closing:
                self._ready.append(ready)
        if not is_wanted:
            self._bodies.undo(ready.encoded, self._reader)
        elif self._asker is not None:
            self._answer()
        return self._state.may_make()

    def _encoded(self, item: object) -> ReadyItem:
        to, context = self._reader, self._suspended.context
        encoded = self._bodies.encode(item, to, context, "result", self._deadline, self._device_map)
        body, payload = encoded.body, encoded.payload
        if body.released:  # what rides must be sent now
            body = replace(body, released=[])
        kept = b"".join(payload) if payload else b""
        return ReadyItem(Item(body, len(kept), encoded.copies), kept, encoded)

    def _close(self) -> None:
        """End the generator, where it waits for the reader to read on."""
        items, source = self._items, self._new_source()  # a new one: it is not cancelled
        deadline = self._agent.clock.now() + self._worker.options.timeouts.call
        try:
            with self._suspended.scope(deadline, source):
                self._suspended.step(getattr(items, "close", _nothing))
        except BaseException as error:
            if not self._closers:
                _log.exception("%s: a stream that was dropped raised", self._worker.name)
            self._ended(error)
        else:
            self._ended(None)

    def _failed(self, items: Iterator[Any], error: BaseException) -> None:
        """The generator has raised, or its item cannot be sent: then it is ended as well."""
        try:
            self._suspended.step(getattr(items, "close", _nothing))
        except BaseException:
            _log.exception("%s: a generator raised when it was closed", self._worker.name)
        is_stopped = self._state.is_closing and isinstance(error, Cancelled)
        self._ended(None if is_stopped else error)

    def _ended(self, error: BaseException | None) -> None:
        failure = None if error is None else self._agent.describe(error)
        with self._lock:
            self._failure, self._items = failure, None
            self._state.has_ended = True
        self._answer()
        self._answer_closers()

    # -- answers

    def _answer(self) -> None:
        """Send what is ready, if the reader waits for it; at the end, that there is no more."""
        with self._lock:
            asker, failure = self._asker, self._failure
            if asker is None or not (self._ready or self._state.has_ended):
                return
            self._asker = None
            batch = self._batch()
            is_last = self._state.has_ended and not self._ready and failure is None
        if batch or failure is None:
            self._agent.guarded(asker.source, partial(self._send, asker, batch, is_last))
        else:
            self._agent.answer(asker.source, failure, deadline=asker.deadline)

    def _batch(self) -> list[ReadyItem]:
        """With the lock held: the items for one message, of those that are ready."""
        batch: list[ReadyItem] = []
        most = min(_MOST_BYTES, self._agent.limits.head // 2)
        while self._ready and len(batch) < _MOST_ITEMS:
            first = self._ready[0]
            most -= len(first.payload) + len(first.item.body.data)
            if batch and most < 0:
                break
            batch.append(self._ready.popleft())
        return batch

    def _send(self, asker: Asker, batch: list[ReadyItem], is_last: bool) -> None:
        payload: list[bytes] = []
        for ready in batch:
            if ready.payload:
                payload += [ready.payload, bytes(-len(ready.payload) % ALIGNMENT)]
        message, left = Items([ready.item for ready in batch], is_last), False
        try:
            left = self._agent.answer(asker.source, message, payload, deadline=asker.deadline)
        finally:
            if not left:
                for ready in batch:
                    self._bodies.undo(ready.encoded, self._reader)

    def _answer_closers(self) -> None:
        with self._lock:
            closers, self._closers = self._closers, []
            answer = self._failure or Done()
        for source, deadline in closers:
            self._agent.answer(source, answer, deadline=deadline)


@final
class Producer:
    """What the reference of a stream's reader points to: when it dies, the generator ends.

    The job that runs the generator holds the Production, not this.
    """

    def __init__(self, production: Production) -> None:
        self.asked, self.end = production.asked, production.end


def producer_in(value: object) -> Producer:
    """The value of a reference, if it is the end of a stream."""
    if not isinstance(value, Producer):
        raise BadMessage(f"items were asked of a {type(value).__name__}, which is no stream")
    return value


def _nothing() -> None:
    """In place of the `close` of an iterator that has none."""
