"""All-gather: each worker of a set contributes a value, and all receive all values.

A wait ends if a worker that is waited for is lost and cannot be reached again. Who sends the values
is up to the layers above: collective.py for groups, compat/rpc/api.py for torch's `_all_gather`.
all_gather_state.py is the state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, final

from gradwire.agent.requests.timer import Clock
from gradwire.errors import CallTimeout, GradwireError, PeerLost
from gradwire.rpc.groups.all_gather_state import Rounds, name_of_member

P = ParamSpec("P")
Reach = Callable[[str], None]
"""Connect to this worker again; raises if it is gone."""
Present = Callable[[], Collection[str]]
"""The names of all present workers."""
Blocked = Callable[[Callable[[], bool], Callable[[], object]], object]
"""Run the second while the first is false, so that the worker knows that this thread waits."""

_GRACE_SECONDS = 1.0
"""How long to wait for messages of a lost worker that are still in our threads."""


@final
class AllGather:
    """The all-gathers that one worker takes part in."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        reach: Reach,
        present: Present,
        blocked: Blocked = lambda _, block: block(),
    ) -> None:
        self._name, self._clock = name, clock
        self._reach, self._present, self._blocked = reach, present, blocked
        self._lock = threading.RLock()  # not `with condition`: Ctrl-C inside of it keeps the lock
        self._changed = threading.Condition(self._lock)
        self._rounds = Rounds()

    def note(
        self, event: Callable[Concatenate[Rounds, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Change the state by a message, or a lost worker, and wake those that wait for it."""
        with self._lock:
            event(self._rounds, *args, **kwargs)
            self._changed.notify_all()

    @contextmanager
    def round(
        self, names: Collection[str], label: str = "", receivers: Collection[str] = ()
    ) -> Iterator[str]:
        """Take part in the next round of a set in the block; gives the id of the round.

        `receivers` are those that this worker will send to, by default the leader.
        """
        present = self._present()
        with self._lock:
            round = self._rounds.entered(names, label)
            self._rounds.forget_without(present)
            for name in receivers or [min(names)]:  # if one is not, a message to it fails
                self._rounds.is_back(name_of_member(name))
        try:
            yield round
        finally:
            with self._lock:
                self._rounds.over(round)

    def wait(
        self,
        round: str,
        names: Collection[str],
        seconds: float,
        *,
        awaited: Collection[str] = (),
        what: str = "an all-gather",
    ) -> dict[str, object]:
        """The values of all workers by name, once they have arrived here.

        By default they come from the leader to the followers, else from each that is `awaited`.
        """
        limit, leader = self._clock.now() + seconds, min(names)
        awaited = awaited or (names if leader == self._name else [leader])
        gathering = f"in {what} of {_spoken(names)}"
        while (values := self._wait(round, awaited, limit, what)) is None:
            with self._lock:
                lost = self._rounds.waits_in_vain(round, awaited)
                late = None if lost else self._late(round, names, seconds, gathering)
            if late is not None:
                raise late
            if self._are_back(lost):
                continue
            self._wait(round, (), min(limit, self._clock.now() + _GRACE_SECONDS), what)
            with self._lock:
                lost = self._rounds.waits_in_vain(round, awaited)
            if lost:
                raise PeerLost(
                    f"{self._name} waits {gathering} for {_spoken(lost)}, which was lost",
                    hint="gather from the remaining workers, or shut down with graceful=False",
                ).about(name_of_member(lost[0]))
        return values

    def _late(
        self, round: str, names: Collection[str], seconds: float, gathering: str
    ) -> CallTimeout:
        missing = self._rounds.missing(round, names)
        hint = "each of them must take part, the same number of times"
        if elsewhere := self._rounds.ahead(missing):
            hint += f"; some wait in others that {self._name} is not in: {', '.join(elsewhere[:3])}"
        return CallTimeout(
            f"{self._name} waited {seconds:.2f} s {gathering}: no value of {_spoken(missing)}",
            hint=hint,
        )

    def _wait(
        self, round: str, awaited: Collection[str], limit: float, what: str
    ) -> dict[str, object] | None:
        """All values; None if the limit has passed, or a worker that is waited for is lost."""

        def is_over() -> bool:
            with self._lock:
                return (
                    self._rounds.whole(round) is not None
                    or self._rounds.failure(round) is not None
                    or self._clock.now() >= limit
                    or bool(self._rounds.waits_in_vain(round, awaited))
                )

        def block() -> None:
            with self._lock:
                while not is_over():
                    left = limit - self._clock.now()
                    self._changed.wait(min(max(left, 0), threading.TIMEOUT_MAX))

        if not is_over():
            self._blocked(is_over, block)
        with self._lock:
            values, failure = self._rounds.whole(round), self._rounds.failure(round)
        if values is None and failure is not None:
            raise PeerLost(f"{what} of {self._name} failed: {failure}")
        return values

    def _are_back(self, names: Collection[str]) -> bool:
        for name in names:
            try:
                self._reach(name)
            except GradwireError:
                return False
            with self._lock:
                self._rounds.is_back(name)
        return True


def _spoken(names: Collection[str]) -> str:
    return ", ".join(sorted(map(name_of_member, names)))
