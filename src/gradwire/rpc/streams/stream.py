"""stream() and Stream: reading the items of a generator that runs on another worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Generic, TypeVar, cast, final

from gradwire.autograd.scope import current_context
from gradwire.current import current_worker, get_current
from gradwire.errors import ArgumentTypeError, UsageError
from gradwire.options import DEFAULT, Timeout
from gradwire.rpc.api import keywords, positional
from gradwire.rpc.calls.client import Target, display_name
from gradwire.rpc.expose.registry import name_of
from gradwire.rpc.groups.several import To
from gradwire.rpc.streams.reader import Opened, Reader
from gradwire.rpc.streams.serving import Streams, open_stream
from gradwire.rpc.streams.window_state import check_ahead
from gradwire.rpc.worker import Worker, serve_on_every_worker

T = TypeVar("T")
serve_on_every_worker(Streams)


def stream(
    to: To,
    produce: Callable[..., Iterable[T]],
    args: tuple[object, ...] | list[Any] = (),
    kwargs: dict[str, Any] | None = None,
    ahead: int = 4,
    timeout: Timeout = DEFAULT,
) -> Stream[T]:
    """Run a generator function on another worker, and read its items here as they come.

    `for item in stream(…)` or `async for`. Items are differentiable, as results of calls are. The
    generator is at most `ahead` items ahead of the reader: a larger number lets more items share
    one message. Waiting for one item takes at most `timeout` seconds. What the generator raises is
    raised at its place. Leaving the loop ends the generator, as does dropping the stream.
    """
    worker: Worker = current_worker.find()
    if not callable(produce):
        raise ArgumentTypeError(
            f"stream() was given a {type(produce).__name__}, not a function",
            hint="pass the generator function itself, and its arguments as args=(...)",
        )
    check_ahead(ahead)
    if get_current()[3] is not None:
        raise UsageError(
            "a stream was opened inside an activation checkpoint, which could not repeat it",
            hint="open it outside, and pass its items to the function of the checkpoint",
        )
    number, name = worker.directory.number(to), display_name(name_of(produce))
    named = {} if kwargs is None else keywords(kwargs)
    target = Target(name_of(open_stream), (produce, ahead, *positional(args)), named, name)
    created = worker.calls.remote(number, target, worker.deadline(timeout))
    what = f"{name} on {worker.directory.name(number)}"
    return Stream(Reader(worker, Opened(created, current_context(), ahead, timeout, what)), worker)


class Stream(Generic[T]):
    """The items of a generator on another worker; `stream` makes one. They are read once."""

    def __init__(self, reader: Reader, worker: Worker) -> None:
        self._reader, self._worker = reader, worker
        worker.refs.on_death(self, reader.drop)

    def __iter__(self) -> StreamLoop[T]:
        return StreamLoop(self, self._reader, self._worker)

    __aiter__ = __iter__

    def close(self) -> None:
        """End the generator where it is and wait for that; raises what its `finally` raises."""
        self._reader.close()

    async def aclose(self) -> None:
        """Like `close`, in an event loop."""
        await self._reader.close_in_loop()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        state = "open" if self._reader.is_open else "over"
        return f"<Stream of {self._reader.what}, {state}>"


@final
class StreamLoop(Generic[T]):
    """One loop over a stream, which ends with it: Python drops this when the loop is left."""

    def __init__(self, stream: Stream[T], reader: Reader, worker: Worker) -> None:
        self._stream, self._reader = stream, reader  # holds the stream as long as the loop runs
        worker.refs.on_death(self, reader.drop)

    def __iter__(self) -> StreamLoop[T]:
        return self

    def __next__(self) -> T:
        return cast(T, self._reader.next())

    def __aiter__(self) -> StreamLoop[T]:
        return self

    async def __anext__(self) -> T:
        return cast(T, await self._reader.next_in_loop())
