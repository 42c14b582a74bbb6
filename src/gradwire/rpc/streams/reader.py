"""The reader of a stream: asks for items, keeps those that have come, decodes each when it is read.

It is used by one thread at a time. What has come and is not read when the stream ends is released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, final

from torch import is_grad_enabled

from gradwire.agent.agent import Answer, Outcome
from gradwire.agent.remote_errors import fresh
from gradwire.agent.requests.promise import Promise
from gradwire.autograd.graph.walk import lift_this_thread
from gradwire.current import current_inbound
from gradwire.errors import BadMessage, GradwireError, PeerLost, UsageError
from gradwire.ids import ContextId
from gradwire.options import Timeout
from gradwire.rpc.calls.client import Created
from gradwire.rpc.calls.in_loop import settled_in_loop
from gradwire.rpc.graph_cut import warn_of_cut
from gradwire.rpc.streams.messages import AskItems, EndStream, Item, Items
from gradwire.rpc.streams.serving import Streams
from gradwire.rpc.streams.window_state import ReaderState
from gradwire.wire.message import ALIGNMENT

if TYPE_CHECKING:
    from gradwire.rpc.worker import Worker


class Opened(NamedTuple):
    """A stream that was opened."""

    created: Created
    context: ContextId | None
    ahead: int
    timeout: Timeout
    what: str
    """its generator and worker, in words"""


@final
class Reader:
    """Reads the items of one stream."""

    def __init__(self, worker: Worker, opened: Opened) -> None:
        self._worker, self._agent, self._opened = worker, worker.agent, opened
        self._streams = worker.part(Streams)
        handle = self._handle = opened.created.handle
        self.owner = handle.owner
        self._reference: object = worker.refs.make(handle)
        self._state = ReaderState(opened.ahead)
        self._came: deque[tuple[Item, memoryview | None]] = deque()
        self._asked: Promise[Outcome] | None = None
        self._error: Exception | None = None
        """what ends the stream, once the items before it are read"""
        self._is_lost: Exception | None = None
        """raised by the next read, whatever has come: its graph is gone"""
        self._turn: list[None] = [None]
        """empty while a thread reads; taken in one step, and never waited for"""
        self._streams.readers.add(self)

    @property
    def what(self) -> str:
        """Its generator and worker, in words."""
        return self._opened.what

    @property
    def is_open(self) -> bool:
        """Whether the other worker keeps the generator for this reader."""
        return self._reference is not None

    # -- reading

    def next(self) -> Any:  # noqa: ANN401
        """The next item; StopIteration after the last."""
        with self._alone():
            while self._must_wait():
                if self._asked is None:
                    self._worker.refs.wait_until_counted(self._handle, self._deadline())
                    self._ask()
                if (asked := self._asked) is not None:
                    self._agent.wait_for(self.owner, asked)
                    self._take(asked)
            return self._read()

    async def next_in_loop(self) -> Any:  # noqa: ANN401
        """The same for the task of an event loop; StopAsyncIteration after the last."""
        with self._alone():
            try:
                while self._must_wait():
                    if self._asked is None:
                        await settled_in_loop(self._opened.created.answer)
                        self._worker.refs.wait_until_counted(self._handle, self._deadline())
                        self._ask()
                    if (asked := self._asked) is not None:
                        await settled_in_loop(asked)
                        self._take(asked)
                return self._read()
            except StopIteration:
                raise StopAsyncIteration from None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            self._turn.pop()
        except IndexError:
            raise UsageError(
                f"two threads or tasks read {self.what} at the same time",
                hint="let one read it, or open a stream for each",
            ) from None
        try:
            yield
        except BaseException as error:
            is_end = isinstance(error, StopIteration | StopAsyncIteration)
            if isinstance(error, Exception) and not is_end:  # not if the wait was interrupted
                self.drop()
            raise
        finally:
            self._turn.append(None)

    def _must_wait(self) -> bool:
        """Whether the next item has not come; raises if there is none."""
        error, self._is_lost = self._is_lost, None
        if self._came and error is None:
            return False
        if error is None:
            error, self._error = self._error, None
        if error is not None:
            raise fresh(error)
        if not self.is_open:
            raise StopIteration
        return True

    def _ask(self) -> None:
        """Ask for more. An error is raised at the place of the items that do not come."""
        deadline = self._deadline()
        seconds = deadline - self._agent.clock.now()
        message = AskItems(self._handle.ref, self._state.read, seconds)
        try:
            self._asked = self._request(message, f"the next item of {self.what}", deadline)
        except GradwireError as error:
            self._error = error

    def _deadline(self) -> float:
        return self._worker.deadline(self._opened.timeout)

    def _request(
        self, message: AskItems | EndStream, what: str, deadline: float
    ) -> Promise[Outcome]:
        return self._agent.request(
            self.owner,
            message,
            deadline=deadline,
            description=what,
            inbound=current_inbound(),
        )[1]

    def _take(self, asked: Promise[Outcome]) -> None:
        """Take what has come for the last request, unless the stream was dropped meanwhile."""
        if self._asked is not asked:
            return
        self._asked, outcome = None, asked.outcome
        if not isinstance(outcome, Answer):
            assert isinstance(outcome, Exception)
            directory = self._worker.directory
            self._error = self._worker.behavior.of_call(outcome, directory)
            return
        message = outcome.message
        try:
            if not isinstance(message, Items):
                raise BadMessage(f"a stream was answered by {type(message).__name__}")
            self._state.came(len(message.items), is_last=message.is_last)
            self._came.extend(zip(message.items, _parts(message, outcome), strict=True))
        except BadMessage as error:
            if isinstance(message, Items):
                self._streams.drop(message.items, self.owner)
            self._error = error
            return
        if message.is_last:
            self._let_go()

    def _read(self) -> Any:  # noqa: ANN401
        """Decode the first item that has come, on the thread that uses it. hot: each item"""
        try:
            item, payload = self._came.popleft()
        except IndexError:  # another loop over the stream was left just now
            raise StopIteration from None
        self._state.read += 1
        if (asked := self._asked) is not None and asked.settled:
            self._take(asked)
        may_ask = self._asked is None and self._error is None and self.is_open
        if may_ask and self._state.should_ask():
            self._ask()
        context, owner = self._opened.context, self.owner
        decoded = self._worker.bodies.decode(item.body, payload, source=owner, context=context)
        if decoded.depth:
            lift_this_thread(decoded.depth)
        if (decoded.cut or item.copies) and is_grad_enabled():
            what = f"an item of {self.what}"
            warn_of_cut(decoded.cut, what, item.copies, source=owner)
        return decoded.value

    # -- the end

    def close(self) -> None:
        """End the generator and wait until it has ended; raises what it raises then."""
        if not self._has_begun():
            self.drop()
            return
        try:
            ending = self._end()
            self._agent.wait_for(self.owner, ending)
            self._raise_from(ending)
        except PeerLost:  # it has ended with its worker
            pass
        finally:
            self.drop()

    async def close_in_loop(self) -> None:
        """The same for the task of an event loop."""
        if not self._has_begun():
            self.drop()
            return
        try:
            ending = self._end()
            await settled_in_loop(ending)
            self._raise_from(ending)
        except PeerLost:
            pass
        finally:
            self.drop()

    def _has_begun(self) -> bool:
        """Whether the generator may be in the middle of its body."""
        has_asked = self._asked is not None or self._state.read > 0
        return has_asked and self.is_open and self._is_lost is None

    def _end(self) -> Promise[Outcome]:
        deadline = self._deadline()
        message = EndStream(self._handle.ref, deadline - self._agent.clock.now())
        return self._request(message, f"the end of {self.what}", deadline)

    def _raise_from(self, ending: Promise[Outcome]) -> None:
        if isinstance(ending.outcome, Exception):
            error = self._worker.behavior.of_call(ending.outcome, self._worker.directory)
            raise fresh(error)

    def lost(self, error: PeerLost) -> None:
        """The worker of the generator was lost: the next item raises. Called by its channel."""
        self._is_lost = error
        self._streams.readers.discard(self)

    def drop(self) -> None:
        """Read no more: the generator ends soon, and what has come is released."""
        asked, self._asked = self._asked, None
        came, self._came = self._came, deque()
        self._let_go()
        self._streams.drop([item for item, _ in came], self.owner)
        if asked is not None:
            self._agent.cancel(asked, "its stream was closed")
            asked.on_settled(self._drop_answer)

    def _drop_answer(self, outcome: Outcome) -> None:
        if isinstance(outcome, Answer) and isinstance(outcome.message, Items):
            items, owner = outcome.message.items, self.owner
            self._agent.dispatch.service.submit(lambda: self._streams.drop(items, owner))

    def _let_go(self) -> None:
        self._reference = None
        self._streams.readers.discard(self)


def _parts(message: Items, answer: Answer) -> list[memoryview | None]:
    """The payload of each item."""
    payload, parts, at = answer.payload, list[memoryview | None](), 0
    for item in message.items:
        end = at + item.size
        if item.size and (payload is None or end > len(payload)):
            raise BadMessage("the items of a stream are longer than the payload they came with")
        parts.append(payload[at:end] if payload is not None and item.size else None)
        at = end + -item.size % ALIGNMENT
    return parts
