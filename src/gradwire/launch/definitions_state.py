"""Which definitions of the program its workers have, and which are still to be sent; no IO.

A definition is a function or class as it was at one moment, known by the digest of its pickle. Each
goes to all workers, so that a function on one of them can call the next by its name. Workers are
numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(slots=True, eq=False)
class Definition:
    """A function or class, and which workers were told of it, have it or could not load it."""

    number: int
    name: str
    """by which it is called"""
    digest: bytes
    told: set[int] = field(default_factory=set)
    had: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)

    def again(self, worker: int) -> None:
        """It is used there: if the worker could not load it before, it is to try again."""
        if worker in self.refused:
            self.refused.discard(worker)
            self.told.discard(worker)


@final
class DefinitionsState:
    """The definitions of one program, the one used last at the end."""

    def __init__(self, workers: Iterable[int]) -> None:
        self._workers = set(workers)
        self._kept: dict[bytes, Definition] = {}
        self._count = 0

    def maybe_find(self, digest: bytes) -> Definition | None:
        """The definition of that digest, which counts as used now."""
        found = self._kept.pop(digest, None)
        if found is not None:
            self._kept[digest] = found
        return found

    def holds(self, definition: Definition) -> bool:
        """Whether it was not forgotten since."""
        return self._kept.get(definition.digest) is definition

    def next_number(self) -> int:
        """A number that no definition had."""
        self._count += 1
        return self._count

    def add(self, number: int, name: str, digest: bytes) -> Definition:
        """Keep a new definition."""
        made = self._kept[digest] = Definition(number, name, digest)
        return made

    def to_tell(self) -> list[tuple[int, Definition]]:
        """Who is to be told of what, in the order of the definitions."""
        kept = sorted(self._kept.values(), key=lambda definition: definition.number)
        return [(w, each) for each in kept for w in sorted(self._workers - each.told)]

    def has(self, worker: int, number: int) -> None:
        """A worker has loaded a definition."""
        for each in self._numbered(number):
            each.had.add(worker)

    def refused(self, worker: int, number: int) -> None:
        """A worker could not load it."""
        for each in self._numbered(number):
            each.refused.add(worker)

    def restarted(self, worker: int) -> None:
        """The worker has lost all that it had."""
        for each in self._kept.values():
            each.told.discard(worker)
            each.had.discard(worker)
            each.refused.discard(worker)

    def gone(self, worker: int) -> None:
        """The worker is lost for good: nobody waits for it."""
        self._workers.discard(worker)

    def missing(self, definition: Definition) -> set[int]:
        """The workers that have not loaded it yet, nor tried to."""
        return self._workers - definition.had - definition.refused

    def forget_all_but(self, most: int) -> list[Definition]:
        """Forget those not used for longest, so that so many are left; returns them."""
        old = list(self._kept.values())[: max(0, len(self._kept) - most)]
        for each in old:
            del self._kept[each.digest]
        return old

    def _numbered(self, number: int) -> list[Definition]:
        return [each for each in self._kept.values() if each.number == number]
