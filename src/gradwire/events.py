"""Events: what a worker did, when, for how long, and for whom.

A worker always keeps its latest rare events (a peer was lost, a pass failed): errors end with them.
While somebody records, it also keeps every message, wait and run. While nobody does, that costs one
attribute read: hot paths look whether `Events.record` is set. seeing/ reads what was kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from threading import get_ident
from typing import Any, Final, Protocol, final

from gradwire.ids import WorkerId

MOST_KEPT: Final = 1 << 17
"""Records of one worker, about 30 MB of them. More are dropped, the oldest first, and counted."""
_MOST_RARE = 256
_STORY_SECONDS, _STORY_LINES = 10.0, 8
_SMALL = {"encode", "decode", "settled", "begin", "done", "prepared"}
"""events that a story leaves out"""
JOINED: Final = "was connected"
NameOf = Callable[[WorkerId], str]

Record = tuple[int, str, float, float, int, Any, Any, Any, int]
"""Its number, what, began, ended, thread, id, peer, about, bytes. A plain tuple of whatever was at
hand: texts are made of it when it is read (seeing/recording.py), as most are never read.
"""


class Add(Protocol):
    """Record what began then and ends now, on this thread."""

    def __call__(
        self,
        what: str,
        began: float,
        id: object,
        peer: WorkerId | str | None = None,
        about: object = "",
        size: int = 0,
    ) -> None:
        """Add it to what is kept."""


class Observer(Protocol):
    """Measures the calls, passes and steps of one worker; seeing/observer.py has the one there is.

    Its methods are called on the thread that does it, which may read a channel: they must not
    block. The values are those of the layers above, which this one does not know.
    """

    def call_leaves(self, sent: Any, call: Any) -> Any:  # noqa: ANN401
        """A call is packed; returns what is sent, which may say more."""

    def serving(self, call: Any, run: Callable[..., object]) -> Callable[..., object]:  # noqa: ANN401
        """The function that runs a peer's call, in place of `run`."""

    def pass_began(self, active: Any) -> None:  # noqa: ANN401
        """A backward pass begins here."""

    def pass_ended(self, active: Any, error: BaseException | None) -> None:  # noqa: ANN401
        """It has ended on all workers."""

    def step(self, id: object, owners: list[str]) -> AbstractContextManager[object]:
        """Around an optimizer step that begins here."""


@final
class Events:
    """The events of one worker, by its clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.record: Add | None = None
        """set while somebody records; hot paths check it before they read the clock"""
        self.observer: Observer | None = None
        """set while durations or spans are wanted"""
        self._numbers = count(1)
        self._rare: deque[Record] = deque(maxlen=_MOST_RARE)
        self._kept: deque[Record] = deque()
        self._watchers: set[Hashable] = set()

    def note(
        self, what: str, id: object, peer: WorkerId | str | None = None, about: str = ""
    ) -> None:
        """Keep a rare event, of this moment."""
        now = self.now()
        record = (next(self._numbers), what, now, now, get_ident(), id, peer, about, 0)
        self._rare.append(record)
        if self.record is not None:
            self._kept.append(record)

    def watch(self, watcher: Hashable) -> int:
        """Record until this watcher, and every other, has left; the number of the next record."""
        if not self._watchers:
            self._kept = deque(maxlen=MOST_KEPT)
            self.record = _adder(self._kept, self._numbers, self.now)
        self._watchers.add(watcher)
        return next(self._numbers)

    def unwatch(self, watcher: Hashable) -> None:
        """This watcher has left."""
        self._watchers.discard(watcher)
        if not self._watchers:
            self.record, self._kept = None, deque()

    @property
    def watchers(self) -> int:
        """How many record now."""
        return len(self._watchers)

    def is_watched_by(self, watcher: Hashable) -> bool:
        """Whether this one records."""
        return watcher in self._watchers

    def kept(self) -> list[Record]:
        """What was recorded and not dropped."""
        return list(self._kept)

    @contextmanager
    def recording(self) -> Iterator[Callable[[], list[Record]]]:
        """Record inside the block; the call returns what was."""
        watcher = object()
        first = self.watch(watcher)
        try:
            yield lambda: [record for record in self.kept() if record[0] > first]
        finally:
            self.unwatch(watcher)

    def story(self, name_of: NameOf) -> str:
        """What happened in the last seconds, a line for each event; empty if nothing did."""
        now = self.now()
        latest = list(self._kept if self.record is not None else self._rare)[-_MOST_RARE:]
        lately = [r for r in latest if r[3] >= now - _STORY_SECONDS and r[1] not in _SMALL]
        if all(r[1] == JOINED for r in lately):
            return ""  # it has just begun
        told = [(now - r[3], _told(r, name_of)) for r in lately[-_STORY_LINES:]]
        lines = [f"  {ago:.3f} s before: {text}" for ago, text in told]
        if len(lately) > len(lines):
            lines.insert(0, f"  {len(lately) - len(lines)} events, and")
        return "\n".join(lines)


def _adder(kept: deque[Record], numbers: count[int], now: Callable[[], float]) -> Add:
    """Not a method: without the lookups it takes two thirds of the time."""
    append, number, ident = kept.append, numbers.__next__, get_ident

    def add(
        what: str,
        began: float,
        id: object,
        peer: WorkerId | str | None = None,
        about: object = "",
        size: int = 0,
    ) -> None:
        append((number(), what, began, now(), ident(), id, peer, about, size))

    return add


def _told(record: Record, name_of: NameOf) -> str:
    _, what, _, _, _, id, peer, about, _ = record
    name = name_of(peer) if isinstance(peer, int) else peer
    about = about[0] if isinstance(about, tuple) else about
    words = [what, str(id or ""), about if isinstance(about, str) else ""]
    return " ".join(filter(None, [f"{name}:" if name else "", *words]))
