"""Trying again when a worker was lost: a step as a unit, and calls that may run twice.

Everything else runs at most once: a call that was on its way when its worker was lost may have run
there or not, and only its author knows whether it may run again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast, final

from gradwire.agent.peers.directory import WorkerInfo
from gradwire.current import current_worker
from gradwire.errors import (
    DeadlinePassed,
    GradwireError,
    NotTrusted,
    PeerLost,
    RemoteError,
    StaleIncarnation,
    UnknownWorker,
    UsageError,
)
from gradwire.rpc.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")

_MARK = "_gradwire_idempotent"
_LOOK_AGAIN_SECONDS = 0.02
_REACH_SECONDS = 2.0


@final
class Attempt:
    """One try; its block is the step. `number` counts from 0, `error` is why the last one failed.

    The loss of a worker inside the block is kept from the program, unless this is the last try.
    """

    def __init__(self, number: int, is_last: bool, error: BaseException | None) -> None:
        self.number, self.error = number, error
        self._is_last = is_last
        self.failure: BaseException | None = None
        """what ended the block, if that was the loss of a worker"""
        self.is_done = False

    def __repr__(self) -> str:
        return f"<Attempt {self.number}>"

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        self.is_done = error is None
        if error is None or not is_loss(error):
            return False
        self.failure = error
        if not self._is_last:
            error.__traceback__ = None  # or the frames of the step would live as long as the next
        return not self._is_last


def retrying(
    times: int = 3,
    *,
    restore: Callable[[Attempt], object] | None = None,
    wait: float = 60.0,
    workers: Iterable[str | WorkerInfo] | None = None,
) -> Iterator[Attempt]:
    """Try a step up to so many times, until no worker is lost in it.

    Each try is a block; what it does is done once more as a whole if a worker is lost in it. Before
    the next try, all `workers` (by default all others that were there) must be back, for which
    there are `wait` seconds; then `restore(attempt)` brings back the state that the step begins
    with: what a lost worker kept, and what others may have changed meanwhile. If a worker is lost
    again while it does so, that was a try too. Whatever else the block raises is raised.

    >>> for attempt in gradwire.retrying(times=5, restore=load_checkpoint):
    ...     with attempt, gradwire.context() as context_id:
    ...         gradwire.backward(context_id, [loss_of(batch)])
    ...         optimizer.step(context_id)
    """
    if times < 1:
        raise UsageError(f"retrying(times={times}) would never try")
    worker = _here()
    names = [info.name for info in worker.directory.others()]
    if workers is not None:
        names = [one if isinstance(one, str) else one.name for one in workers]
    return _tries(worker, times, restore, wait, names)


def _tries(
    worker: Worker,
    times: int,
    restore: Callable[[Attempt], object] | None,
    wait: float,
    names: list[str],
) -> Iterator[Attempt]:
    error: BaseException | None = None
    for number in range(times):
        attempt = Attempt(number, number == times - 1, error)
        if error is not None:
            _await_back(worker, names, worker.agent.clock.now() + wait, error)
            with attempt:
                if restore is not None:
                    restore(attempt)
            error = attempt.failure
            if error is not None:
                continue
        yield attempt
        if attempt.failure is None:  # done; or left by break, or without its block
            return
        error = attempt.failure


def is_loss(error: BaseException) -> bool:
    """Whether it came of a lost worker, here or where a function of ours ran."""
    known: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in known:
        if isinstance(cause, NotTrusted):
            return False
        if isinstance(cause, PeerLost):
            return True
        known.add(id(cause))
        cause = cause.__cause__
    return False


def _await_back(worker: Worker, names: list[str], deadline: float, error: BaseException) -> None:
    """Until each of these is connected, in whichever life."""
    pause = threading.Event()
    for name in names:
        while (missing := _maybe_missing(worker, name, deadline)) is not None:
            if worker.agent.clock.now() >= deadline:
                raise DeadlinePassed(
                    f"{name} was lost and did not come back in time: {missing}",
                    hint="run(restarts=…) starts lost workers again; retrying(wait=…) waits longer",
                ) from error
            pause.wait(_LOOK_AGAIN_SECONDS)


def _maybe_missing(worker: Worker, name: str, deadline: float) -> GradwireError | None:
    """Why a worker cannot be reached now."""
    try:
        limit = min(deadline, worker.agent.clock.now() + _REACH_SECONDS)
        worker.agent.reach(worker.directory.find(name).id, limit)
    except (PeerLost, DeadlinePassed, UnknownWorker) as error:
        if isinstance(error, NotTrusted):
            raise
        return error
    return None


def idempotent(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that may run twice where it was asked for once.

    `rpc_sync` asks again for it when its worker is lost, once that is back, until the deadline of
    the call. Not inside a context: what a lost worker computed is lost for the whole of it.
    """
    setattr(function, _MARK, True)
    return function


def is_idempotent(function: Callable[..., Any]) -> bool:
    """Whether it was marked so."""
    return getattr(function, _MARK, False) is True


def again_until(worker: Worker, to: WorkerInfo, deadline: float, call: Callable[[], T]) -> T:
    """What an idempotent call returns, asked for again whenever its worker is lost."""
    while True:
        try:
            return call()
        except PeerLost as error:
            if isinstance(error, RemoteError | StaleIncarnation | NotTrusted):
                raise  # its worker was not lost, or it would be no better next time
            if worker.agent.clock.now() >= deadline:
                raise
            _await_back(worker, [to.name], deadline, error)


def _here() -> Worker:
    return cast(Worker, current_worker.find())
