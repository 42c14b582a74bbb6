"""The calls that a checkpoint's function makes, in order, and what their callees drew.

Pure: no torch, no threads. The k-th call of the recomputation repeats the k-th of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from gradwire.errors import UsageError

State = tuple[bytes, ...]
"""of the generators of one worker: that of the CPU, then those of its devices"""
Key = tuple[int, str]
"""the worker that was called, and the function"""


def nothing_new(_: bool) -> None:
    """What is known of a call is all that will be."""


@dataclass(slots=True, eq=False)
class Place:
    """One call of a forward, and what its callee sent home to repeat it."""

    key: Key
    known: bool = False
    """whether its answer has come"""
    lost: bool = False
    """whether it was never answered: then nothing was computed with it"""
    drawn: bytes = b""
    """sealed by the callee; empty if no random number was drawn"""
    look: Callable[[bool], None] = nothing_new
    """see whether the answer has come by now, or wait for it"""

    def answered(self, drawn: bytes) -> None:
        """It was, or the function raised; what is known stays."""
        if not self.known:
            # In this order: another thread that finds it known must also find what was drawn.
            self.drawn = drawn
            self.known = True

    def failed(self) -> None:
        """There is no answer: the callee was lost, or late."""
        self.lost = not self.known


UNKNOWN = Place((-1, ""))
"""a call that the forward did not make, or made from another thread"""


@final
class Tape:
    """What one forward has done, to be repeated any number of times."""

    def __init__(self, state: State = (), end: State | bytes = (), *, raised: bool = False) -> None:
        self.state, self.end, self.raised = state, end, raised
        self.places: list[Place] = []
        self.after: dict[int, State] = {}
        """the generators after a wait, by its number, where others had moved them meanwhile"""
        self.is_mixed = False
        """whether others may have drawn from the generators at the same time"""

    @property
    def has_drawn(self) -> bool:
        """Whether a repetition has to do anything to get the same numbers."""
        return self.has_drawn_here or any(place.drawn for place in self.places)

    @property
    def has_drawn_here(self) -> bool:
        """The same, without what callees have drawn."""
        return bool(self.state != self.end or self.after)

    def answered_places(self, *, wait: bool = False) -> Sequence[Place]:
        """Those that count. A call that was lost, and made again by somebody, counts once."""
        for place in self.places:
            place.look(wait)
        return [place for place in self.places if not place.lost]

    def repeated(self, n: int, key: Key) -> Place:
        """The n-th call is made again."""
        places = self.answered_places(wait=True)
        if n >= len(places):
            return UNKNOWN
        if places[n] is not UNKNOWN and places[n].key != key and self.has_drawn:
            raise UsageError(
                f"the recomputation of a checkpoint calls {key[1]} on w{key[0]} where its forward "
                f"called {places[n].key[1]} on w{places[n].key[0]}: it cannot repeat the random "
                "numbers that were drawn there",
                hint="the function of a checkpoint makes the same calls each time it is run",
            )
        return places[n]
