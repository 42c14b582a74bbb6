"""barrier and all_gather: what all members of a group do together.

Each member sends its value to all others, and waits for theirs. Nobody leads: each knows by itself
who is missing, and hears of the loss of any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar, final

from gradwire.current import current_inbound, current_worker
from gradwire.errors import DeadlinePassed, PeerLost, RemoteError, StaleIncarnation, UsageError
from gradwire.ids import WorkerId
from gradwire.options import DEFAULT, Timeout
from gradwire.rpc.calls.client import Target
from gradwire.rpc.calls.futures import Future
from gradwire.rpc.codec.encoded_once import EncodedOnce
from gradwire.rpc.expose.registry import expose, name_of
from gradwire.rpc.groups.all_gather import AllGather
from gradwire.rpc.groups.all_gather_state import Rounds, members_of, name_of_member
from gradwire.rpc.groups.group import Group
from gradwire.rpc.worker import Worker

T = TypeVar("T")
Members = Group | Sequence[str] | None


def barrier(group: Members = None, timeout: Timeout = DEFAULT) -> None:
    """Wait until each worker of the group has called this; of all workers without a group.

    Each must call it the same number of times. PeerLost names a member that was lost, CallTimeout
    those that had not come after `timeout` seconds (by default `Timeouts(call=…)`).
    """
    _here().gather(None, group, timeout, "barrier")


def all_gather(value: T, group: Members = None, timeout: Timeout = DEFAULT) -> list[T]:
    """The values of all workers of the group, in its order, once each has called this.

    For small values: each crosses to each, as the argument of a call, with its graph. The own value
    is not copied. Errors as of `barrier`.
    """
    return _here().gather(value, group, timeout, "all_gather")


@final
class Collectives:
    """The barriers and all-gathers of one worker."""

    def __init__(self, worker: Worker) -> None:
        agent, directory = worker.agent, worker.directory
        self._worker, self._directory = worker, directory
        self._gathers = AllGather(
            worker.name, agent.clock, _not_again, self._present, partial(agent.wait, None)
        )
        agent.on_peer_lost(lambda lost, _: self._lost(directory.name(lost)))

    def gather(self, value: Any, group: Members, timeout: Timeout, what: str) -> list[Any]:  # noqa: ANN401
        """The values of all members, in their order."""
        worker, clock = self._worker, self._worker.agent.clock
        numbers = self._numbers(group, what)
        members = list(map(self._member, numbers))
        label = f"{what}/{group.name}" if isinstance(group, Group) else what
        spoken = f"{what} {group.name}".strip() if isinstance(group, Group) else what
        deadline, me = worker.deadline(timeout), self._member(worker.directory.me.id)
        with self._gathers.round(members, label, members) as round:
            self._send(round, value, [n for n in numbers if n != worker.directory.me.id], deadline)
            self._gathers.note(Rounds.contributed, round, me, value, members)
            seconds = deadline - clock.now()
            values = self._gathers.wait(round, members, seconds, awaited=members, what=spoken)
        worker.calls.lift_above(list(values.values()))  # they arrived on other threads
        return [values[member] for member in members]

    def heard(self, round: str, source: WorkerId, value: object) -> None:
        """A peer has sent its value."""
        members, me = members_of(round), self._member(self._directory.me.id)
        if me not in members:
            if name_of_member(me) in map(name_of_member, members):
                raise StaleIncarnation(f"{self._worker.name} was started again since {round} began")
            raise UsageError(f"{self._worker.name} is no member of {round}")
        self._gathers.note(Rounds.contributed, round, self._member(source), value, members)

    def _numbers(self, group: Members, what: str) -> list[WorkerId]:
        directory = self._directory
        if group is None:
            return [info.id for info in directory.all()]
        numbers = [directory.number(name) for name in group]
        if directory.me.id not in numbers or len({*numbers}) < len(numbers):
            raise UsageError(
                f"{self._worker.name} called {what} of {', '.join(group)}, which does not have it "
                "once",
                hint="each member calls it, and nobody else",
            )
        return numbers

    def _member(self, number: WorkerId) -> str:
        """The name of a worker, with its incarnation if that is not the first."""
        incarnation, name = self._directory.incarnation(number), self._directory.name(number)
        return f"{name}.{incarnation}" if incarnation else name

    def _present(self) -> list[str]:
        return [self._member(info.id) for info in self._directory.all()]

    def _lost(self, name: str) -> None:
        self._gathers.note(Rounds.lost, name)

    def _send(self, round: str, value: object, to: list[WorkerId], deadline: float) -> None:
        what = round.partition("/")[0]
        target = Target(name_of(contribute), (round, value), {}, what, encode=EncodedOnce())
        has_left = False
        try:
            for number in to:
                name = self._directory.name(number)
                try:
                    sent = self._worker.calls.call_async(number, target, deadline)
                    sent.add_done_callback(partial(self._was_sent, round, name))
                    has_left = True
                except PeerLost:
                    self._lost(name)
        except BaseException:
            if not has_left:
                self._gathers.note(Rounds.withdrawn, round)
            raise

    def _was_sent(self, round: str, name: str, sent: Future[Any]) -> None:
        """A peer has taken our value, or it has not."""
        try:
            sent.wait()
        except DeadlinePassed:
            pass  # the wait for its value has the same deadline
        except RemoteError as error:
            self._gathers.note(Rounds.failed, round, f"{name} refused its value: {error.message}")
        except PeerLost:
            self._lost(name)


def _not_again(name: str) -> NoReturn:
    raise PeerLost(f"{name} may have lost what was sent to it")


def _here() -> Collectives:
    worker: Worker = current_worker.find()
    return worker.part(Collectives)


@expose
def contribute(round: str, value: object) -> None:
    """Take the value of the peer that calls this; a part of `all_gather`."""
    if not isinstance(round, str) or not round.partition("#")[2].isdecimal():
        raise UsageError(f"{round!r:.80} is no round of a group")
    _here().heard(round, current_inbound().worker, value)
