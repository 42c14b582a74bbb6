"""Retries after the loss of a worker: `retrying` for a whole step, `idempotent` for single calls.

Everything else runs at most once: a call whose worker was lost may have run or not, and only its
author knows whether it may run again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar, final

from gradwire.agent.peers.directory import WorkerInfo
from gradwire.autograd.scope import current_context
from gradwire.current import current_worker
from gradwire.errors import (
    DeadlinePassed,
    NotTrusted,
    PeerLost,
    RemoteError,
    StaleIncarnation,
    UnknownWorker,
    UsageError,
)
from gradwire.ids import WorkerId
from gradwire.rpc.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")

_MARK = "_gradwire_idempotent"
_LOOK_AGAIN_SECONDS = 0.02
_REACH_SECONDS = 2.0


@final
class Attempt:
    """One attempt at a step, used as a context manager around it.

    `number` counts from 0; `error` is the error of the attempt before. It suppresses the loss of a
    worker inside the block, unless this is the last attempt.
    """

    def __init__(self, number: int, is_last: bool, error: BaseException | None) -> None:
        self.number, self._is_last, self.error = number, is_last, error
        self.failure: BaseException | None = None
        """the error that ended the block, if it was the loss of a worker"""
        self.is_done = False

    def __repr__(self) -> str:
        return f"<Attempt {self.number}>"

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.is_done = error is None
        if error is None or not is_loss(error):
            return False
        self.failure = error
        if not self._is_last:
            # Its frames would keep the step's values alive during the next one.
            error.__traceback__ = None
        return not self._is_last


def retrying(
    times: int = 3,
    *,
    restore: Callable[[Attempt], object] | None = None,
    wait: float = 60.0,
    workers: Iterable[str | WorkerInfo] | None = None,
) -> Iterator[Attempt]:
    """Attempt a step up to `times` times, until no worker is lost in it.

    The body of the loop is run again as a whole if a worker is lost in it. Before that, it waits up
    to `wait` seconds until all `workers` (by default all other workers) are back, and calls
    `restore(attempt)`, which must restore the state at the beginning of the step: what a lost
    worker kept, and what the other workers may have changed. A loss during `restore` counts as a
    failed attempt. Other exceptions are raised at once.

    >>> for attempt in gradwire.retrying(times=5, restore=load_checkpoint):
    ...     with attempt:
    ...         optimizer.zero_grad()
    ...         loss_of(batch).backward()
    ...         optimizer.step()
    """
    if times < 1:
        raise UsageError(f"retrying(times={times}) would never try")
    worker: Worker = current_worker.find()
    awaited = worker.directory.others() if workers is None else workers
    names = [one if isinstance(one, str) else one.name for one in awaited]

    def attempts() -> Iterator[Attempt]:
        error: BaseException | None = None
        for number in range(times):
            attempt = Attempt(number, number == times - 1, error)
            if error is not None:
                _wait_until_back(worker, names, worker.agent.clock.now() + wait, error)
                with attempt:
                    if restore is not None:
                        restore(attempt)
            if attempt.failure is None:
                yield attempt
                if attempt.failure is None:  # done; or left by break, or not entered
                    return
            error = attempt.failure

    return attempts()


def is_loss(error: BaseException) -> bool:
    """Whether the error or one of its causes is the loss of a worker, seen here or by a callee.

    The group of a call to several workers is one if all its members are.
    """
    known: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in known:
        if isinstance(cause, NotTrusted):
            return False
        if isinstance(cause, PeerLost):
            return True
        if isinstance(cause, BaseExceptionGroup) and all(map(is_loss, cause.exceptions)):
            return True
        known.add(id(cause))
        cause = cause.__cause__
    return False


def _wait_until_back(
    worker: Worker, names: list[str], deadline: float, error: BaseException
) -> None:
    """Wait until each of these workers is connected again, restarted or not."""
    clock, waiting_for = worker.agent.clock, deque(names)
    while waiting_for:
        name = waiting_for[0]
        try:
            limit = min(deadline, clock.now() + _REACH_SECONDS)
            worker.agent.reach(worker.directory.find(name).id, limit)
            waiting_for.popleft()
        except NotTrusted:
            raise
        except (PeerLost, DeadlinePassed, UnknownWorker) as missing:
            if clock.now() >= deadline:
                raise DeadlinePassed(
                    f"{name} was lost and did not come back in time: {missing}",
                    hint="run(restarts=…) starts lost workers again; retrying(wait=…) waits longer",
                ) from error
            time.sleep(_LOOK_AGAIN_SECONDS)


def idempotent(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that may run twice for one call.

    If its worker is lost, `rpc_sync` repeats the call when the worker is back, until the call's
    deadline. Not inside of a context, whose graph a lost worker breaks.
    """
    setattr(function, _MARK, True)
    return function


def can_repeat(
    worker: Worker, to: WorkerId, function: Callable[..., Any], deadline: float, error: PeerLost
) -> bool:
    """Whether a call that failed may be repeated: then its worker is back, and was waited for."""
    if getattr(function, _MARK, False) is not True or current_context() is not None:
        return False
    # After these the worker was not lost, or a repetition would fail as well.
    is_useless = isinstance(error, RemoteError | StaleIncarnation | NotTrusted)
    if is_useless or worker.agent.clock.now() >= deadline:
        return False
    _wait_until_back(worker, [worker.directory.name(to)], deadline, error)
    return True
