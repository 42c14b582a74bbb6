"""Who is still there: when each link was last heard, whom to ask, whom to suspect, whom to give up.

Rules of this file:
  1. Pure. No threads, no clock: time is an argument. Links are carried, never touched.
  2. A sign of life is a number that has changed since the last look: whatever comes changes it. So
     traffic costs nothing, and is not added to: only a link that was silent for a while is asked.
  3. Only time during which we could listen counts as silence. If the last look is longer ago than
     looks are apart, it was us who were stopped, or starved: that time is taken from everybody's
     silence. So whoever wakes up asks before it gives anybody up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar, final

_LOOKS = 5
"""How often to look until a silent link is suspect: silence is known that exactly."""

K = TypeVar("K")


@final
@dataclass(slots=True)
class _Heard:
    sign: int | None
    silent_since: float
    is_asked: bool = False
    is_suspect: bool = False


@final
@dataclass(slots=True)
class Findings(Generic[K]):
    """What a look has found; the numbers are seconds of silence."""

    ask: list[K] = field(default_factory=list)
    """those that should say that they are there, now"""
    suspect: dict[K, float] = field(default_factory=dict)
    """those that have been silent for too long, for the first time"""
    back: list[K] = field(default_factory=list)
    """those that were suspect, and were heard since"""
    dead: dict[K, float] = field(default_factory=dict)
    """those that are given up; they are not watched any longer"""


class Patience(NamedTuple):
    """How long a silence may last, in seconds."""

    suspect: float
    dead: float


@final
class FailureDetector(Generic[K]):
    """What one worker knows of its links."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self.pause = min(patience) / _LOOKS
        """from one look to the next"""
        self._links: dict[K, _Heard] = {}
        self._looked: float | None = None

    def look(self, now: float, signs: Mapping[K, int | None]) -> Findings[K]:
        """These links there are, each with its sign; None for one that is alive for certain."""
        found: Findings[K] = Findings()
        stopped = self._stopped(now)
        self._links = {link: known for link, known in self._links.items() if link in signs}
        for link, sign in signs.items():
            known = self._links.get(link)
            if known is None:
                self._links[link] = _Heard(sign, now)
            elif sign is None or sign != known.sign:
                if known.is_suspect:
                    found.back.append(link)
                self._links[link] = _Heard(sign, now)
            else:
                if stopped:
                    known.silent_since += stopped
                    known.is_asked = False
                self._judge(link, known, now - known.silent_since, found)
        for link in found.dead:
            del self._links[link]
        return found

    def silence(self, link: K, now: float) -> float:
        """How long a suspect link has been silent; 0 for all others."""
        known = self._links.get(link)
        return now - known.silent_since if known is not None and known.is_suspect else 0.0

    def next_look(self) -> float | None:
        """When to look again; None while there is nothing to watch."""
        return self._looked + self.pause if self._looked is not None and self._links else None

    def _stopped(self, now: float) -> float:
        """How much of the time since the last look we were not there ourselves."""
        due, self._looked = self._looked, now
        if due is None or not self._links:
            return 0.0
        gap = now - due
        return gap - self.pause if gap > 2 * self.pause else 0.0

    def _judge(self, link: K, known: _Heard, silence: float, found: Findings[K]) -> None:
        if silence >= self._patience.dead and known.is_asked:
            found.dead[link] = silence
            return
        if silence >= self._patience.suspect and not known.is_suspect:
            known.is_suspect = True
            found.suspect[link] = silence
        if 2 * silence >= min(self._patience):
            known.is_asked = True
            found.ask.append(link)
