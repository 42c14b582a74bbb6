"""as_completed and wait: several futures at once, as in concurrent.futures.

A thread that waits for calls to one worker reads its channel. With calls to several it blocks, and
the readers of their channels wake it. Torch's own futures may be among them.
"""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeGuard, TypeVar, final

import torch

from gradwire.agent.requests.promise import Promise
from gradwire.errors import ArgumentTypeError, UsageError, WaitTimeout
from gradwire.ids import WorkerId
from gradwire.rpc.calls.futures import Future, behind, checked_seconds, settles
from gradwire.rpc.recompute.checkpoint_run import waiting

AnyFuture = torch.futures.Future[Any]
F = TypeVar("F", bound=AnyFuture)

_WHEN = (
    concurrent.futures.FIRST_COMPLETED,
    concurrent.futures.FIRST_EXCEPTION,
    concurrent.futures.ALL_COMPLETED,
)
_MOST_NAMED = 3


class Waited(NamedTuple):
    """The futures that a `wait` has found done, and the others."""

    done: set[AnyFuture]
    not_done: set[AnyFuture]


def as_completed(futures: Iterable[F], timeout: float | None = None) -> Iterator[F]:
    """Yield the futures as they are done, those first that are done already.

    WaitTimeout if one is not done so many seconds after this was called; the calls go on. Futures
    of torch may be among them.
    """
    group = Awaited(_checked(futures), timeout)

    def in_order() -> Iterator[F]:
        try:
            group.listen()
            for _ in range(group.size):
                yield group.next()  # type: ignore[misc]  # one of those given
        finally:
            group.close()

    return in_order()


def wait(
    futures: Iterable[AnyFuture],
    timeout: float | None = None,
    return_when: str = concurrent.futures.ALL_COMPLETED,
) -> Waited:
    """Wait until all futures are done, the first one, or the first one that fails.

    `return_when` is a constant of `concurrent.futures`. Returns the futures that are done and those
    that are not, after `timeout` seconds at the latest.
    """
    if return_when not in _WHEN:
        raise UsageError(
            f"return_when={return_when!r:.80} is none of {', '.join(_WHEN)}",
            hint="they are constants of concurrent.futures",
        )
    given = _checked(futures)
    group, done = Awaited(given, timeout), set[AnyFuture]()
    try:
        with waiting():
            group.listen()
            while len(done) < group.size:
                if (future := group.came(blocks=not done or return_when != _WHEN[0])) is None:
                    break
                done.add(future)
                if return_when == _WHEN[1] and _has_failed(future):
                    break
    finally:
        group.close()
    done.update(future for future in given if future.done())
    return Waited(done, set(given) - done)


@final
class Awaited:
    """Futures that one thread waits for together; `close` ends it."""

    def __init__(self, futures: list[AnyFuture], timeout: float | None) -> None:
        self._timeout, self.size = timeout, len(futures)
        self._pending = dict(enumerate(futures))
        self._ours = {n: behind(each) for n, each in self._pending.items() if is_ours(each)}
        self._peers: Counter[WorkerId | None] = Counter(map(self._peer, self._pending))
        self._listening: dict[int, Callable[[object], None]] = {}
        self._came: deque[int] = deque()
        self._news: Promise[None] = Promise()
        ours = next(iter(self._ours.values()), None)
        self._agent = None if ours is None else ours.agent
        self._now = time.monotonic if self._agent is None else self._agent.clock.now
        self._until = math.inf if timeout is None else self._now() + checked_seconds(timeout)

    def listen(self) -> None:
        """Be told of the futures from now on."""
        for n, future in self._pending.items():
            self._listening[n] = heard = partial(self._heard, n)
            if n in self._ours:
                self._ours[n].promise.on_settled(heard)
            else:
                future.add_done_callback(heard)

    def close(self) -> None:
        """Forget the futures that are not done."""
        for n in self._pending.keys() & self._ours.keys() & self._listening.keys():
            self._ours[n].promise.forget(self._listening[n])
        self._pending.clear()

    def _peer(self, n: int) -> WorkerId | None:
        return self._ours[n].callee if n in self._ours else None

    def _heard(self, n: int, _: object) -> None:
        self._came.append(n)  # first: a waiting thread replaces `_news`, then looks here
        self._news.settle(None)

    def next(self) -> AnyFuture:
        """The next future that is done; WaitTimeout if none is in time."""
        with waiting():  # once for each, as waits under a checkpoint are numbered
            future = self.came(blocks=True)
        if future is None:
            raise WaitTimeout(self._late(), hint="they go on: wait again, or cancel() them")
        return future

    def came(self, *, blocks: bool) -> AnyFuture | None:
        """A future that is done, if one is or, if this blocks, will be in time."""
        while not self._came:
            news: Promise[None] = Promise()
            self._news = news
            if not self._came and not (blocks and self._settles(news)):
                break
        if not self._came:
            return None
        n = self._came.popleft()
        self._peers -= Counter([self._peer(n)])
        return self._pending.pop(n)

    def _settles(self, news: Promise[None]) -> bool:
        if self._agent is not None:
            peer = next(iter(self._peers)) if len(self._peers) == 1 else None
            return settles(self._agent, peer, news, self._until)
        try:
            news.wait(None if self._until == math.inf else self._until - self._now())
        except TimeoutError:
            return False
        return True

    def _late(self) -> str:
        late = [*self._pending.values()]
        shown = ", ".join(map(repr, late[:_MOST_NAMED]))
        more = ", …" if len(late) > _MOST_NAMED else ""
        return (
            f"{len(late)} of {self.size} futures were not done in {self._timeout} s: {shown}{more}"
        )


def _checked(futures: Iterable[F]) -> list[F]:
    """The futures, each once."""
    try:
        found = list(dict.fromkeys(futures))
    except TypeError:
        found = [futures]  # type: ignore[list-item]  # refused below, unless it is one future
        if isinstance(futures, torch.futures.Future):
            raise ArgumentTypeError(
                "a single future was given where several are expected", hint="pass a list of them"
            ) from None
    for future in found:
        if not isinstance(future, torch.futures.Future):
            raise ArgumentTypeError(
                f"a {type(future).__name__} is no future",
                hint="pass a list of what rpc_async returns, or of torch.futures.Future",
            )
    return found


def is_ours(future: AnyFuture) -> TypeGuard[Future[Any]]:
    """Whether it is a future of gradwire, not one of torch."""
    return isinstance(future, Future)


def _has_failed(future: AnyFuture) -> bool:
    if is_ours(future):
        return behind(future).has_failed()
    try:
        future.value()
    except Exception:
        return True
    return False
