"""The state of all-gathers. Pure.

A *round* belongs to a set of members, and to a label if it has one. Each worker numbers the rounds
of a set for itself: the n-th that it enters is the same for all. Its id is `label/a,b#n`. A member
is the name of a worker, and `name.2` if this is its second incarnation after the first: the rounds
with a worker that was started again are counted from 0 again. A worker that is *lost* before its
value arrived will not contribute, unless it comes back.

Under compat the first in alphabetical order is the *leader*, which receives all values and sends
them to the *followers*. In groups each member sends its value to all others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import final

from gradwire.errors import OverLimit, UsageError

MOST_AHEAD = 64
"""How many rounds a worker may have a value in that were not entered here."""


def name_of_member(member: str) -> str:
    """The name of the worker, without its incarnation."""
    return member.partition(".")[0]


def members_of(round: str) -> list[str]:
    """The members of the round with this id, or of the set that it begins with."""
    return round.partition("#")[0].rpartition("/")[2].split(",")


@dataclass(slots=True)
class _Round:
    values: dict[str, object] = field(default_factory=dict)
    is_entered: bool = False
    is_whole: bool = False
    failure: str | None = None


@final
class Rounds:
    """The rounds that one worker takes part in."""

    def __init__(self) -> None:
        self._entered: dict[str, int] = {}
        self._rounds: dict[str, _Round] = {}
        self._lost: set[str] = set()

    def __len__(self) -> int:
        return len(self._rounds)

    @property
    def sets(self) -> int:
        """The number of sets whose rounds are counted."""
        return len(self._entered)

    def entered(self, names: Collection[str], label: str = "") -> str:
        """This worker enters the next round of a set; the id of the round."""
        together = ",".join(sorted(names))  # no name has a comma, or a slash
        if label:
            together = f"{label}/{together}"
        n = self._entered.get(together, 0)
        self._entered[together] = n + 1
        round = f"{together}#{n}"
        self._rounds.setdefault(round, _Round()).is_entered = True
        return round

    def withdrawn(self, round: str) -> None:
        """This worker has entered, but told nobody: its next round has the same number."""
        together, _, n = round.rpartition("#")
        if self._entered.get(together) == int(n) + 1:
            self._entered[together] = int(n)

    def forget_without(self, present: Collection[str]) -> None:
        """Drop the rounds of sets that have absent members: there will be no more of them."""
        there, rounds = set(present), self._rounds
        busy = {round.rpartition("#")[0] for round in rounds if rounds[round].is_entered}

        def stays(together: str) -> bool:
            return together in busy or there.issuperset(members_of(together))

        self._entered = {names: n for names, n in self._entered.items() if stays(names)}
        self._rounds = {r: rounds[r] for r in rounds if stays(r.rpartition("#")[0])}
        self._lost &= set(map(name_of_member, there))

    def contributed(self, round: str, name: str, value: object, names: Collection[str]) -> None:
        """A value is received, maybe before this worker enters. Late values are ignored."""
        if self._is_over(round):
            return
        if round not in self._rounds and len(self.ahead([name])) >= MOST_AHEAD:
            raise OverLimit(f"{name} has values in {MOST_AHEAD} all-gathers that have not begun")
        if name not in names:
            raise UsageError(f"{name} is not expected in the all-gather of {', '.join(names)}")
        heard = self._rounds.setdefault(round, _Round())
        if name in heard.values:
            raise UsageError(f"{name} has contributed to all-gather {round} twice")
        heard.values[name] = value
        self._lost.discard(name_of_member(name))
        heard.is_whole = heard.values.keys() == set(names)

    def concluded(self, round: str, values: Mapping[str, object]) -> None:
        """A follower receives all values. Late ones are ignored."""
        if self._is_over(round):
            return
        heard = self._rounds.setdefault(round, _Round())
        if heard.is_whole:
            raise UsageError(f"all-gather {round} has ended twice")
        heard.values, heard.is_whole = dict(values), True

    def failed(self, round: str, reason: str) -> None:
        """A follower learns that the leader has given up."""
        if not self._is_over(round):
            self._rounds.setdefault(round, _Round()).failure = reason

    def failure(self, round: str) -> str | None:
        """Why the leader of this round, which was entered, has given up; or None."""
        return self._rounds[round].failure

    def whole(self, round: str) -> dict[str, object] | None:
        """All values, or None until they have arrived."""
        heard = self._rounds[round]
        return heard.values if heard.is_whole else None

    def missing(self, round: str, names: Collection[str]) -> list[str]:
        """The names whose value has not arrived here."""
        heard = self._rounds.get(round, _Round())
        return sorted(set(names) - heard.values.keys())

    def ahead(self, names: Collection[str]) -> list[str]:
        """The rounds in which one of these has a value, and that were not entered here."""
        these = self._rounds.items()
        return [r for r, heard in these if not heard.is_entered and heard.values.keys() & {*names}]

    def lost(self, name: str) -> None:
        """The connection to this worker has ended."""
        self._lost.add(name)

    def is_back(self, name: str) -> None:
        """The worker is connected again."""
        self._lost.discard(name)

    def waits_in_vain(self, round: str, names: Collection[str]) -> list[str]:
        """Those of these names that are lost and have not contributed."""
        return [n for n in self.missing(round, names) if name_of_member(n) in self._lost]

    def over(self, round: str) -> None:
        """This worker has left the round."""
        self._rounds.pop(round, None)

    def _is_over(self, round: str) -> bool:
        together, _, n = round.rpartition("#")
        return round not in self._rounds and int(n) < self._entered.get(together, 0)
