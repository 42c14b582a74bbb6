"""The failure detector: which links are silent, and which of them to ping, suspect or declare dead.

Rules of this file:
  1. Pure. No threads, no clock: time is an argument. Links are keys, never touched.
  2. A sign of life is a number that has changed since the last look: each received frame changes
     it. So traffic costs nothing, and a ping is sent only on a link that was silent for a while.
  3. Only time during which this worker could listen counts as silence. If looks are further apart
     than planned, this worker itself was stopped or starved: that time is subtracted from each
     silence. So a worker that was frozen pings its peers before it declares any of them dead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar, final

_LOOKS = 5  # until a silent link is suspect: the resolution at which silence is measured

K = TypeVar("K")


@final
@dataclass(slots=True)
class _Heard:
    sign: int | None
    silent_since: float
    is_pinged: bool = False
    is_suspect: bool = False


@final
@dataclass(slots=True)
class Findings(Generic[K]):
    """The links that a look has found; numbers are seconds of silence."""

    ping: list[K] = field(default_factory=list)
    suspect: dict[K, float] = field(default_factory=dict)  # since this look
    back: list[K] = field(default_factory=list)  # were suspect, and have given a sign of life
    dead: dict[K, float] = field(default_factory=dict)  # not watched any longer


@final
class FailureDetector(Generic[K]):
    """After so many seconds of silence a link of one worker is `suspect`, and `dead`."""

    def __init__(self, suspect: float, dead: float) -> None:
        self._suspect, self._dead = suspect, dead
        self.pause = min(suspect, dead) / _LOOKS  # seconds from one look to the next
        self._links: dict[K, _Heard] = {}
        self._looked: float | None = None

    def look(self, now: float, signs: Mapping[K, int | None]) -> Findings[K]:
        """Judge these links by their signs; None stands for one that is certainly alive."""
        found: Findings[K] = Findings()
        gap = now - self._looked if self._looked is not None and self._links else 0.0
        stopped = gap - self.pause if gap > 2 * self.pause else 0.0
        self._looked = now
        self._links = {link: known for link, known in self._links.items() if link in signs}
        for link, sign in signs.items():
            known = self._links.get(link)
            if known is None or sign is None or sign != known.sign:
                if known is not None and known.is_suspect:
                    found.back.append(link)
                self._links[link] = _Heard(sign, now)
            else:
                if stopped:
                    known.silent_since += stopped
                    known.is_pinged = False
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

    def _judge(self, link: K, known: _Heard, silence: float, found: Findings[K]) -> None:
        if silence >= self._dead and known.is_pinged:
            found.dead[link] = silence
            return
        if silence >= self._suspect and not known.is_suspect:
            known.is_suspect = True
            found.suspect[link] = silence
        if 2 * silence >= min(self._suspect, self._dead):
            known.is_pinged = True
            found.ping.append(link)
