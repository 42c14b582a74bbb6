"""Workers that each contribute a value and all receive all of them.

Pure. A *round* belongs to a set of names and is numbered within that set by each worker for itself:
the n-th time one of them enters is the same round for all. The first name by the alphabet *leads*:
it hears everyone's value and sends out the whole. One that is *lost* before it has spoken will not
speak any more, unless it turns out to be back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import final

from gradwire.errors import UsageError


@dataclass(slots=True)
class _Round:
    values: dict[str, object] = field(default_factory=dict)
    is_whole: bool = False
    failure: str | None = None


@final
class Rounds:
    """The rounds that one worker takes part in."""

    def __init__(self) -> None:
        self._entered: dict[str, int] = {}
        self._rounds: dict[str, _Round] = {}
        self._inside: set[str] = set()
        self._lost: set[str] = set()

    def __len__(self) -> int:
        return len(self._rounds)

    @property
    def sets(self) -> int:
        """How many sets of names it counts the rounds of."""
        return len(self._entered)

    def entered(self, names: Collection[str]) -> str:
        """This worker begins one more; what it is called."""
        together = ",".join(sorted(names))  # no name has a comma
        n = self._entered.get(together, 0)
        self._entered[together] = n + 1
        round = f"{together}#{n}"
        self._inside.add(round)
        return round

    def forget_without(self, present: Collection[str]) -> None:
        """Drop what is known of sets whose names are not all present: they gather no more."""
        there = set(present)
        busy = {round.rpartition("#")[0] for round in self._inside}

        def stays(together: str) -> bool:
            return together in busy or there.issuperset(together.split(","))

        self._entered = {names: n for names, n in self._entered.items() if stays(names)}
        self._rounds = {
            r: heard for r, heard in self._rounds.items() if stays(r.rpartition("#")[0])
        }
        self._lost &= there

    def contributed(self, round: str, name: str, value: object, names: Collection[str]) -> None:
        """The leader hears a value, maybe before it enters; what comes too late is not kept."""
        if self._is_over(round):
            return
        if name not in names:
            raise UsageError(f"{name} is not expected in the gathering of {', '.join(names)}")
        heard = self._rounds.setdefault(round, _Round())
        if name in heard.values:
            raise UsageError(f"{name} has contributed to gathering {round} twice")
        heard.values[name] = value
        self._lost.discard(name)
        heard.is_whole = heard.values.keys() == set(names)

    def concluded(self, round: str, values: Mapping[str, object]) -> None:
        """Somebody who follows hears all of them; what comes too late is not kept."""
        if self._is_over(round):
            return
        heard = self._rounds.setdefault(round, _Round())
        if heard.is_whole:
            raise UsageError(f"gathering {round} has ended twice")
        heard.values, heard.is_whole = dict(values), True

    def failed(self, round: str, story: str) -> None:
        """Somebody who follows hears that the leader has given up."""
        if not self._is_over(round):
            self._rounds.setdefault(round, _Round()).failure = story

    def failure(self, round: str) -> str | None:
        """Why the leader has given up, if it has."""
        heard = self._rounds.get(round)
        return None if heard is None else heard.failure

    def whole(self, round: str) -> dict[str, object] | None:
        """All values, once they are there."""
        heard = self._rounds.get(round)
        return heard.values if heard is not None and heard.is_whole else None

    def missing(self, round: str, names: Collection[str]) -> list[str]:
        """Whose value is not there yet, as far as this worker knows."""
        heard = self._rounds.get(round, _Round())
        return sorted(set(names) - heard.values.keys())

    def lost(self, name: str) -> None:
        """There is no connection to it any more."""
        self._lost.add(name)

    def is_back(self, name: str) -> None:
        """There is one again."""
        self._lost.discard(name)

    def waits_in_vain(self, round: str, names: Collection[str]) -> list[str]:
        """Which of these are lost, and have not spoken."""
        return [name for name in self.missing(round, names) if name in self._lost]

    def over(self, round: str) -> None:
        """This worker is done with it."""
        self._rounds.pop(round, None)
        self._inside.discard(round)

    def _is_over(self, round: str) -> bool:
        together, _, n = round.rpartition("#")
        return round not in self._inside and int(n) < self._entered.get(together, 0)
