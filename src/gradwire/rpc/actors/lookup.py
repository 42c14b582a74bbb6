"""actor() and lookup(): to make an actor, and to find a value by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from gradwire.agent.requests.promise import Promise
from gradwire.current import current_worker
from gradwire.errors import CallTimeout, GradwireError
from gradwire.options import DEFAULT, Timeout
from gradwire.rpc.actors.actor import Actor, check_concurrency
from gradwire.rpc.actors.mailboxes import Mailboxes
from gradwire.rpc.actors.names import Names, check_name, find_name, name_value
from gradwire.rpc.api import remote
from gradwire.rpc.calls.client import Target
from gradwire.rpc.calls.futures import Future
from gradwire.rpc.expose.registry import name_of
from gradwire.rpc.groups.several import To
from gradwire.rpc.rref import RRef
from gradwire.rpc.worker import Worker, serve_on_every_worker

T = TypeVar("T")
Found = RRef[Any] | Actor[Any]
serve_on_every_worker(Mailboxes)


def actor(
    to: To,
    cls: Callable[..., T],
    args: tuple[object, ...] | list[Any] = (),
    kwargs: dict[str, Any] | None = None,
    max_concurrency: int = 1,
    timeout: Timeout = DEFAULT,
    *,
    name: str | None = None,
) -> Actor[T]:
    """Make an object on another worker whose methods run one at a time; a handle on it, at once.

    `handle.method(…)` returns a future. At most `max_concurrency` methods run at a time, and they
    begin in order of arrival. If the constructor raises, the first use raises what it raised. With
    a `name`, every worker finds the actor by `lookup`, as with `remote(…, name=…)`.
    """
    check_concurrency(max_concurrency)
    if name is not None:
        check_name(name)
    rref = remote(to, cls, args, kwargs, timeout)
    if name is not None:
        name_value(name, rref, max_concurrency, timeout)
    return Actor(rref, max_concurrency)


def lookup(name: str, timeout: Timeout = DEFAULT) -> Found:
    """The value that was given this name by `remote` or `actor`; waits until there is one.

    "ps" asks all workers that are there now, and returns what the first has that answers; "w1:ps"
    asks w1 only. Give a name once in a world, or look it up with its worker. A name ends with its
    worker, or with the last reference to its value: this returns a reference, which holds it. It
    blocks: in an `async def` function, use what was found before.
    """
    worker: Worker = current_worker.find()
    to, colon, plain = name.partition(":") if isinstance(name, str) else ("", "", name)
    if not colon:
        to, plain = "", name
    check_name(plain)
    directory, deadline = worker.directory, worker.deadline(timeout)
    asked = [directory.find(to)] if colon else directory.all()
    if directory.me in asked and (found := worker.part(Names).maybe(plain)) is not None:
        return found
    target = Target(name_of(find_name), (plain,), {}, f"looking up {plain!r}")
    if colon:
        return worker.calls.call(asked[0].id, target, deadline)  # type: ignore[no-any-return]
    futures = []
    try:
        for each in asked:
            try:
                futures.append(worker.calls.call_async(each.id, target, deadline))
            except GradwireError as error:  # it is lost; the others are asked
                futures.append(worker.calls.failed(error))
        return _first(worker, plain, futures)
    finally:
        for future in futures:
            future.cancel()


def _first(worker: Worker, name: str, futures: list[Future[Found]]) -> Found:
    """What the first of these has found."""
    first: Promise[Found | Exception] = Promise()
    left = [len(futures)]

    def done(future: Future[Found]) -> None:
        try:
            first.settle(future.wait())
        except Exception as error:
            left[0] -= 1
            if not left[0]:
                first.settle(error)

    for future in futures:
        future.add_done_callback(done)
    found = worker.agent.wait_for(None, first)
    if isinstance(found, CallTimeout):
        raise CallTimeout(
            f"no worker has a value named {name!r}",
            hint="remote(…, name=…) or actor(…, name=…) names one, as long as it has a reference",
        ) from found
    if isinstance(found, Exception):
        raise found
    return found
