"""Streams: the ends of streams that one worker has, of those it produces and of those it reads."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, final

from gradwire.agent.serving.dispatch import Lane, Payload, Source
from gradwire.current import current_worker
from gradwire.errors import PeerLost, UsageError
from gradwire.ids import RefId, WorkerId
from gradwire.rpc.expose.registry import expose
from gradwire.rpc.refs.refs import Content, Raised
from gradwire.rpc.streams.messages import AskItems, EndStream, Item, Items
from gradwire.rpc.streams.production import Asker, Producer, Production, producer_in
from gradwire.rpc.streams.window_state import check_ahead
from gradwire.wire.message import Message

if TYPE_CHECKING:
    from gradwire.rpc.worker import Worker

Use = Callable[[Producer, Asker], None]


class StreamReader(Protocol):
    """The reader of a stream, as far as this file knows it."""

    @property
    def owner(self) -> WorkerId:
        """The worker that runs the generator."""

    def lost(self, error: PeerLost) -> None:
        """That worker was lost."""


@final
class Streams:
    """Serves the readers of this worker's generators; tells readers here of lost workers."""

    def __init__(self, worker: Worker) -> None:
        agent = self._agent = worker.agent
        self._worker = worker
        self._lock = threading.RLock()  # a finalizer that interrupts its holder may end a stream
        self.readers: set[StreamReader] = set()
        agent.locks.add(self._lock)
        agent.kinds.add(Items)
        agent.handle(AskItems, self._serve_ask, Lane.USER, attrgetter("ref"))  # runs generators
        agent.handle(EndStream, self._serve_end, Lane.SERVICE)
        agent.on_answer(Items, lambda _: False, lambda *_: None, self._came_late)
        agent.on_peer_lost(self._peer_lost)

    def producer(self, items: Iterator[Any], ahead: int) -> Producer:
        """The end of a stream, which a call that is served here keeps for its caller."""
        production = Production(self._worker, items, ahead, self._lock)
        producer = Producer(production)
        why = "nobody reads the stream any more"
        self._worker.refs.on_death(producer, partial(production.end, why))
        return producer

    def _serve_ask(self, message: AskItems, _: Payload, source: Source) -> None:
        read = message.read
        self._use(message.ref, message.seconds, source, lambda p, asker: p.asked(read, asker))

    def _serve_end(self, message: EndStream, _: Payload, source: Source) -> None:
        why = "its stream was closed"
        self._use(message.ref, message.seconds, source, lambda p, asker: p.end(why, asker))

    def _use(self, ref: RefId, seconds: float, source: Source, use: Use) -> None:
        """Give a request to the end of the stream, once that is made."""
        asker = Asker(source, self._agent.clock.now() + seconds)

        def made(content: Content) -> None:
            if isinstance(content, Raised):
                self._agent.answer(source, content.failure, deadline=asker.deadline)
            else:
                use(producer_in(content.value), asker)

        def settled(content: Content) -> None:
            self._agent.guarded(source, partial(made, content))

        self._worker.refs.content(ref, source.worker).on_settled(settled)

    def _came_late(self, peer: WorkerId, message: Message) -> None:
        assert isinstance(message, Items)
        self.drop(message.items, peer)

    def drop(self, items: list[Item], peer: WorkerId) -> None:
        """Release what items hold that nobody reads."""
        worker = self._worker
        for item in items:
            worker.refs.release(item.body.references)
            worker.engine.drop_crossings(item.body.crossings, peer)
            worker.engine.devices.drop(item.body.tensors, peer)

    def _peer_lost(self, peer: WorkerId, error: PeerLost) -> None:
        for reader in list(self.readers):
            if reader.owner == peer:
                reader.lost(error)


@expose
def open_stream(
    produce: Callable[..., object], ahead: int, /, *args: object, **kwargs: object
) -> Producer:
    """Make the generator of a stream. Its body begins when the reader asks for the first item."""
    check_ahead(ahead)
    items, name = produce(*args, **kwargs), getattr(produce, "__name__", type(produce).__name__)
    if not isinstance(items, Iterator):
        is_async = isinstance(items, AsyncGenerator)
        hint = "yield from a def, not from an async def" if is_async else "it must contain a yield"
        raise UsageError(
            f"{name} returned a {type(items).__name__}: stream() takes a generator function",
            hint=hint,
        )
    streams: Streams = current_worker.find().part(Streams)
    return streams.producer(items, ahead)
