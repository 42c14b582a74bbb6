"""Small frames through shared memory: no system call at either end while the receiver polls.

A ring is one direction of a unix channel. Its sender makes it, in an anonymous file (memfd) that
both processes map, and announces it by a frame of the channel's own (sockets/writer.py). Page 0
holds three words of 64 bits, each in a cache line of its own:

    TAIL    bytes ever written to the ring, by the sender
    HEAD    bytes ever read from it, by the receiver
    AWAKE   not 0 while the receiver looks at TAIL before it sleeps; written by the receiver

An entry is the number of its frame, the frame, and padding to a multiple of 8. It does not wrap: if
it does not fit at the end of the ring, SKIP is there instead, and it is at the beginning.

Note [Ring and socket]
Each frame goes through the ring or the socket, and both ends number the frames of a channel from 1.
So the order is kept: the receiver takes an entry if its number is the next one, and else the next
frame is in the socket. It looks at the ring after it has read bytes from the socket and before it
takes them. So it sees an entry that was sent before them.

No frame waits for a receiver that sleeps. Before the receiver sleeps, it clears AWAKE and then
looks at TAIL; the sender sets TAIL and then looks at AWAKE. Each has a fence between the two, so at
least one of them sees what the other did. A sender that finds AWAKE cleared by then wakes the
receiver by an empty frame in the socket. If AWAKE is cleared before, or the ring is full, the frame
itself goes through the socket.

This relies on the order in which x86 processors make stores visible, so other machines use no
rings. A word of 64 bits is read and written in one piece. A peer may write anything at any time, as
to all shared memory: lengths are read once and then checked, and a frame is copied before its use.
"""

from __future__ import annotations

import platform
import threading
from typing import Final, final

from gradwire.errors import BadMessage
from gradwire.transport.shared_memory import FIRST_PAGE, Block

CAN_RING: Final = platform.machine() in ("x86_64", "AMD64")
RING_BYTES: Final = 1 << 16
TAIL: Final = 0
HEAD: Final = 8
AWAKE: Final = 16
NUMBER_BYTES: Final = 8
SKIP: Final = (1 << 64) - 1


@final
class Ring:
    """One end of a ring; the thread that uses it holds the send lock, or the read lock."""

    __slots__ = ("_fence", "data", "numbers", "place", "words")

    def __init__(self, block: Block) -> None:
        whole = block.memory.data
        self.words = whole[:FIRST_PAGE].cast("Q")
        self.data = whole[FIRST_PAGE : FIRST_PAGE + RING_BYTES]
        self.numbers = self.data.cast("Q")
        """the same bytes"""
        self.place = 0
        """how far this end has written or read"""
        self._fence = threading.Lock()

    def fence(self) -> None:
        """What this thread has stored is visible to all before it loads what follows."""
        if self._fence.acquire(blocking=False):  # a locked instruction of the processor
            self._fence.release()

    def is_watched(self) -> bool:
        """For the sender, after it has set TAIL: whether the receiver will look at it."""
        self.fence()
        return bool(self.words[AWAKE])

    def next_frame(self, number: int) -> int:
        """For the receiver: where in `data` the frame of this number is; -1 if not in the ring."""
        place = self.place
        unread = self.words[TAIL] - place
        if not unread:
            return -1
        found = self.numbers[place % RING_BYTES >> 3]
        if found == SKIP:  # an entry follows, as both became visible at once
            place += -place % RING_BYTES
            found = self.numbers[0]
        if found != number:
            return -1
        if not 0 < unread <= RING_BYTES:
            raise BadMessage(f"a ring of {RING_BYTES} bytes claims to hold {unread}")
        self.place = place
        return place % RING_BYTES + NUMBER_BYTES

    def is_ahead(self, number: int) -> bool:
        """For the receiver: whether the ring has frames, and this one was sent before them."""
        has_any = self.words[TAIL] != self.place
        return has_any and self.next_frame(number) < 0

    def may_sleep(self) -> bool:
        """For the receiver: make the sender use the socket; False if the ring has an entry."""
        self.words[AWAKE] = 0
        self.fence()
        return bool(self.words[TAIL] == self.place)


def entry_bytes(length: int) -> int:
    """The size of the entry of a frame of this length."""
    return NUMBER_BYTES + length + 7 & -8
