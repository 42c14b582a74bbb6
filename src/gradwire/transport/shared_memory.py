"""Large payloads beside the socket: copied once into shared blocks, read where they lie.

A frame whose payload lies in a block has the flag IN_BLOCK. Its prefix says the payload's length as
ever; in the place of the payload come eight bytes: the block's number u32, and u32 1 if this is the
first time, which is when its descriptor travels along (SCM_RIGHTS), else 0. A channel that
understands this sets TAKES_BLOCKS on all it sends, and a peer uses blocks from then on.

Nothing here waits. Where no block can be had the payload goes through the socket, which has its own
way to wait for a peer that does not read: when all blocks are held by the peer's tensors, when
HELD_AT_MOST bytes were announced and not yet received, or when the system has no memory for more.

This file must not know sockets but for the descriptors that come with their bytes.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final, TypeAlias, cast, final

from gradwire.errors import BadMessage
from gradwire.options import Limits
from gradwire.transport.base import HELD_AT_MOST
from gradwire.transport.buffer_pool import size_class
from gradwire.transport.memfd import FREE, GONE, SENT, Block, adopt, make
from gradwire.wire.frame import Buffer

_log = logging.getLogger("gradwire")

SHARED_AT_MOST: Final = 1 << 30
"""Bytes of shared memory that one end of one channel makes."""

NOTE: Final = struct.Struct("<II")
ANCILLARY_ROOM: Final = socket.CMSG_SPACE(struct.calcsize("i"))
READ_FLAGS: Final = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))

Ancillary: TypeAlias = Sequence[tuple[int, int, bytes]]
Received: TypeAlias = tuple[int, Ancillary, int, object]
"""What `socket.recvmsg_into` returns."""

SHARED_FROM: Final = 1 << 17
"""The smallest payload that does not go through the socket; below, both take the same time."""

MOST_BLOCKS: Final = 128
"""Blocks that one end of one channel has at a time."""

_LOOSEST_FIT: Final = 4
# At most one frame is incomplete when the next one's first byte is read.
_MOST_UNCLAIMED: Final = 2


@final
class Loan:
    """A block of ours: being filled, or with the peer, or free."""

    __slots__ = ("_descriptors", "block", "is_filling", "length")

    def __init__(self, block: Block, descriptor: int) -> None:
        self.block = block
        # Empty once the peer has it. A list, as the end of a send and that of the channel may meet
        # here: only one of them pops it.
        self._descriptors = [descriptor]
        self.is_filling = False
        self.length = 0

    @property
    def note(self) -> bytes:
        """What goes in the place of the payload."""
        return NOTE.pack(self.block.number, len(self._descriptors))

    @property
    def ancillary(self) -> Ancillary:
        """What goes along with the frame's first byte."""
        rights = array("i", self._descriptors).tobytes()
        return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []

    @property
    def unread(self) -> int:
        """Bytes that the peer has been told of and has not received."""
        return self.length if not self.is_filling and self.block.state == SENT else 0

    def begin(self, length: int) -> None:
        """From now on nobody else may have it."""
        self.block.state = SENT
        self.is_filling = True
        self.length = length

    def __enter__(self) -> None:
        """The frame is being sent; if that fails, none of it has left, or all is over anyway."""

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is not None:
            self.withdraw()
            return
        self.close()
        self.is_filling = False

    def withdraw(self) -> None:
        """The peer will not hear of it."""
        self.is_filling = False
        self.block.state = FREE

    def close(self) -> None:
        """Let go of the descriptor; the mapping stays."""
        with suppress(IndexError):
            os.close(self._descriptors.pop())


@final
class Lender:
    """The blocks that one end of a channel makes and fills."""

    def __init__(self, limit: int = SHARED_AT_MOST, smallest: int = SHARED_FROM) -> None:
        self._limit = limit
        self._smallest = smallest
        self._lock = threading.RLock()
        self._is_inside: Callable[[], bool] = cast(Any, self._lock)._is_owned
        """whether this thread has the lock: then it is interrupted by who asks"""
        self._loans: list[Loan] = []  # the least recently used first
        self._making = 0
        self._bytes = 0
        self._numbers = count(1)
        self._is_closed = False
        self._has_complained = False

    @property
    def bytes(self) -> int:
        """Of shared memory that exist now."""
        return self._bytes

    def place(self, payload: Sequence[Buffer]) -> Loan | None:
        """The payload in a block, or None if it has to go another way.

        hot: benchmarks of bandwidth
        """
        length = sum(map(len, payload))
        if not 0 < length >= self._smallest:
            return None
        try:
            loan = self._take(length)
        finally:
            if self._is_closed:
                self._forget()
        if loan is not None:
            try:
                loan.block.fill(payload)
            except BaseException:
                loan.withdraw()
                raise
        return loan

    def close(self) -> None:
        """Make no more blocks, and forget those there are."""
        self._is_closed = True
        self._forget()

    def _forget(self) -> None:
        # A signal handler may close while its own thread is in `_take`, so this must not wait:
        # whoever has the lock looks at `_is_closed` afterwards.
        if self._is_inside() or not self._lock.acquire(blocking=False):
            return
        try:
            for loan in self._loans:
                loan.close()
            self._loans.clear()
            self._bytes = 0
        finally:
            self._lock.release()

    def _take(self, length: int) -> Loan | None:
        room = size_class(length)
        if self._is_inside():
            return None
        with self._lock:
            if self._is_closed or sum(loan.unread for loan in self._loans) >= HELD_AT_MOST:
                return None
            loan = self._best_fit(length)
            if loan is not None:
                loan.begin(length)
                return loan
            if not self._has_room_for(room):
                return None
            self._bytes += room
            self._making += 1
        return self._made(room, length)

    def _best_fit(self, length: int) -> Loan | None:
        """The smallest free block that is large enough, and of those the one used last."""
        sizes = range(length, _LOOSEST_FIT * length + 1)
        fitting = [
            loan
            for loan in reversed(self._loans)
            if loan.block.room in sizes and loan.block.state == FREE
        ]
        if not fitting:
            return None
        best = min(fitting, key=lambda loan: loan.block.room)
        self._loans.remove(best)
        self._loans.append(best)
        return best

    def _has_room_for(self, room: int) -> bool:
        """Whether one more may be made; free ones are dropped for it, the longest unused first."""
        if room > self._limit:
            return False
        free = iter([loan for loan in self._loans if loan.block.state == FREE])
        while self._bytes + room > self._limit or len(self._loans) + self._making >= MOST_BLOCKS:
            loan = next(free, None)
            if loan is None:
                return False
            loan.block.state = GONE
            loan.close()
            self._loans.remove(loan)
            self._bytes -= loan.block.room
        return True

    def _made(self, room: int, length: int) -> Loan | None:
        loan = None
        try:
            loan = Loan(*make(next(self._numbers), room))
            loan.begin(length)
        except OSError as error:
            self._complain(room, error)
        finally:
            with self._lock:
                self._making -= 1
                if loan is None:
                    self._bytes -= room
                else:
                    self._loans.append(loan)
        return loan

    def _complain(self, room: int, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            _log.warning("no %d bytes of shared memory, the socket is used: %s", room, error)


def descriptors_in(received: Received) -> list[int]:
    """Those that came beside bytes."""
    found = array("i")
    for level, kind, data in received[1]:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found.tolist()


@final
class Borrower:
    """The peer's blocks, as one end of a channel reads them; used by one thread at a time."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self.unclaimed: deque[int] = deque()
        """descriptors that came, the first of them with the first frame that speaks of a new one"""

    def open(
        self, note: Buffer, length: int, limits: Limits, descriptor: int | None = None
    ) -> memoryview:
        """The payload that a note speaks of; BadMessage if there is no such thing.

        A new block comes with its descriptor, which is closed.
        """
        number, is_new = NOTE.unpack(note)
        if is_new:
            block: Block | None = self._introduced(number, descriptor, limits)
        else:
            block = self._blocks.get(number)
        if block is None:
            raise BadMessage(f"shared block {number} was never introduced")
        if not 0 < length <= block.room:
            raise BadMessage(f"{length} bytes are not in shared block {number} of {block.room}")
        if block.is_lent:
            raise BadMessage(f"shared block {number} was filled again while it was in use")
        return block.lend(length)

    def close(self) -> None:
        """Forget every block; what still lies on one keeps its memory."""
        self._blocks.clear()
        while self.unclaimed:
            os.close(self.unclaimed.popleft())

    def forget_unclaimed(self) -> None:
        """Close those that no frame has spoken of."""
        while len(self.unclaimed) > _MOST_UNCLAIMED:
            os.close(self.unclaimed.popleft())

    def _introduced(self, number: int, descriptor: int | None, limits: Limits) -> Block:
        if descriptor is None:
            raise BadMessage(
                f"shared block {number} came without its descriptor",
                hint="if this process has no free descriptors, raise ulimit -n",
            )
        gone = [known for known, block in self._blocks.items() if block.state == GONE]
        for known in gone:
            del self._blocks[known]
        block = adopt(number, descriptor, size_class(limits.payload))
        if number in self._blocks or len(self._blocks) >= MOST_BLOCKS:
            raise BadMessage(f"shared block {number} is one too many")
        self._blocks[number] = block
        return block


@final
class SharedMemory:
    """What one channel has of it, in both directions."""

    def __init__(self, limit: int = SHARED_AT_MOST, smallest: int = SHARED_FROM) -> None:
        self.lender = Lender(limit, smallest)
        self.smallest = smallest
        self.borrower = Borrower()
        self.peer_takes_blocks = False

    def place(self, payload: Sequence[Buffer]) -> Loan | None:
        """The payload in a block, if the peer can read it there."""
        if not payload or not self.peer_takes_blocks:
            return None
        return self.lender.place(payload)

    def close(self) -> None:
        """When nobody sends or receives any more."""
        self.lender.close()
        self.borrower.close()
