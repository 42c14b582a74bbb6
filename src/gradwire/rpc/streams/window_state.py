"""How far the generator of a stream may be ahead of its reader, at both ends. Pure.

The reader says with each request how many items it has read. It asks again when half of what may be
ahead is left to read: then items are on their way while it reads the others, and a request brings
several of them if they are made fast.
"""

from __future__ import annotations

from typing import Final, final

from gradwire.errors import BadMessage, UsageError

MOST_AHEAD: Final = 1 << 16
"""items that may be made ahead"""


def check_ahead(ahead: object) -> None:
    """UsageError unless it is a number of items."""
    if type(ahead) is not int or not 1 <= ahead <= MOST_AHEAD:
        raise UsageError(
            f"a stream was asked for with ahead={ahead!r:.40}",
            hint=f"it is the number of items made ahead of the reader, from 1 to {MOST_AHEAD}",
        )


@final
class ReaderState:
    """What the reader of a stream has read, and what has come."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self.read = self._came = 0

    def should_ask(self) -> bool:
        """Whether to ask for more, if that is not under way. More may be made then, so it comes."""
        return self._came - self.read <= self._ahead // 2

    def came(self, count: int, *, is_last: bool) -> None:
        """So many items have come; BadMessage if they are more than were asked for, or none."""
        if count > self.read + self._ahead - self._came:
            raise BadMessage(f"a stream brought {count} items, which is more than may be ahead")
        if not count and not is_last:
            raise BadMessage("a stream brought no item, though it goes on")
        self._came += count


@final
class ProductionState:
    """What the generator of a stream has to do; at most one thread runs it at a time."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._read = self.made = 0
        self._runs = False
        self.is_closing = False
        self.has_ended = False

    def asked(self, read: int) -> None:
        """The reader has read so many items; BadMessage if that cannot be."""
        if not self._read <= read <= self.made:
            raise BadMessage(f"of {self.made} items of a stream, {read} were read")
        self._read = read

    def begins(self) -> bool:
        """Whether a thread has to run it now; one does from here on, until `goes_on` is False."""
        begins = not self._runs and self._has_work()
        self._runs = self._runs or begins
        return begins

    def goes_on(self) -> bool:
        """Whether the thread that runs it has to go on."""
        self._runs = self._has_work()
        return self._runs

    def may_make(self) -> bool:
        """Whether one more item may be made."""
        is_open = not self.is_closing and not self.has_ended
        return is_open and self.made < self._read + self._ahead

    def _has_work(self) -> bool:
        return not self.has_ended and (self.is_closing or self.may_make())
