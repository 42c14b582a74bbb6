"""Large payloads through shared memory: the sender copies them once, the receiver not at all.

A frame whose payload lies in a block has the flag IN_BLOCK. Its prefix has the payload's length as
usual; eight bytes replace the payload: the block's number u32, and a u32 that is 1 when the block
is used for the first time, with its descriptor attached (SCM_RIGHTS), else 0. A channel that
understands this sets TAKES_BLOCKS on all frames it sends, and the peer then begins to use blocks.

Nothing here waits. The payload goes through the socket, which can wait for a slow peer, if the
peer's tensors occupy all blocks, if MAX_BUFFERED_BYTES were announced and not yet received, or if
the system has no memory for another block.

A block is an anonymous file (memfd) that both processes map. The first byte of page 0 is the state,
the payload begins at page 1. One end makes the block and fills it, the other borrows it. The state
says which end may use it:

    FREE   the maker may fill or drop it
    SENT   filled and announced, not yet received
    READ   received; views of it are alive
    GONE   dropped by its maker; the borrower forgets it when it next looks

The borrower returns a block by writing one byte. A finalizer does so, which can run anywhere, so it
must not do more. All reads happen before that write: the last view has died then.

A descriptor comes from a peer, and `_adopt` trusts nothing about it. Both ends can write to a block
at any time; workers of one user trust each other not to do so while it is lent. A forked child
shares the blocks of its parent: it must copy what it wants to keep.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from types import SimpleNamespace
from typing import Any, Final, TypeAlias, cast, final

import numpy
import torch

from gradwire.errors import BadMessage
from gradwire.options import Limits
from gradwire.transport.base import MAX_BUFFERED_BYTES
from gradwire.transport.buffer_pool import Memory, size_class
from gradwire.wire.message import Buffer

_log = logging.getLogger("gradwire")

FREE, SENT, READ, GONE = range(4)
FIRST_PAGE: Final = 4096

# The most bytes of shared memory, and the most blocks, that one end of one channel makes.
SHARED_AT_MOST: Final = 1 << 30
MOST_BLOCKS: Final = 128
SHARED_FROM: Final = 1 << 17  # for a smaller payload the socket is as fast

NOTE: Final = struct.Struct("<II")
ANCILLARY_ROOM: Final = socket.CMSG_SPACE(struct.calcsize("i"))

Ancillary: TypeAlias = Sequence[tuple[int, int, bytes]]
Received: TypeAlias = tuple[int, Ancillary, int, object]
"""The result of `socket.recvmsg_into`."""

_LOOSEST_FIT: Final = 4
# At most one frame is incomplete when the first byte of the next one is read.
_MOST_UNCLAIMED: Final = 2
_COPIED_WITHOUT_GIL: Final = 1 << 15


def can_share() -> bool:
    """Whether this system has memfd, and /proc to map it by path."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


@final
class Block:
    """A mapped block; it is unmapped when neither it nor a view of it is referenced.

    Its maker fills and sends it in a `with` block, its borrower lends it to tensors.
    """

    def __init__(self, number: int, descriptor: int, room: int) -> None:
        self.number, self.room = number, room
        self._memory = _mapped(descriptor, FIRST_PAGE + room)
        self.state = self._memory.data[:1]  # one byte, which the peer may change at any time
        self.lease: Callable[[], Memory | None] = lambda: None
        """returns None unless the view returned by `lend`, or a slice of it, is alive"""
        # Its maker keeps it until the peer has it. A list, because a send that ends and a close of
        # the channel may both close it: `pop` succeeds for one of them only.
        self.descriptors: list[int] = []
        self.is_filling = False
        self.length = 0

    def announced(self) -> tuple[bytes, Ancillary]:
        """What replaces the payload in the frame, and the descriptor of a new block beside it."""
        rights = array("i", self.descriptors).tobytes()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
        return NOTE.pack(self.number, len(ancillary)), ancillary

    @property
    def is_free(self) -> bool:
        """Whether the block may be filled; not before its last send has closed the descriptor."""
        return not self.is_filling and self.state[0] == FREE

    @property
    def unread(self) -> int:
        """Bytes announced to the peer and not yet received."""
        return self.length if not self.is_filling and self.state[0] == SENT else 0

    def begin(self, length: int) -> Block:
        """Reserve the block for a payload of this length."""
        self.state[0] = SENT
        self.is_filling, self.length = True, length
        return self

    def __enter__(self) -> None:
        """Fill the block and send the frame."""

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is None:
            self.close()
        else:  # no byte of the frame was sent, or the channel ended
            self.state[0] = FREE
        self.is_filling = False

    def close(self) -> None:
        """Close the descriptor; the mapping stays."""
        with suppress(IndexError):
            os.close(self.descriptors.pop())

    def fill(self, payload: Sequence[Buffer]) -> None:
        """Copy the parts into the block one after the other; the payload is not copied again."""
        start = FIRST_PAGE
        for part in payload:
            end = start + len(part)
            if len(part) >= _COPIED_WITHOUT_GIL:
                self._memory[start:end] = numpy.frombuffer(part, dtype=numpy.uint8)
            else:
                self._memory.data[start:end] = part
            start = end

    def lend(self, nbytes: int) -> memoryview:
        """The first `nbytes` of the payload; the block becomes FREE when their last view dies."""
        # A slice of a memoryview refers to the array, not to the memoryview it was sliced from. So
        # the weak reference is to the array.
        lease = self._memory[FIRST_PAGE : FIRST_PAGE + nbytes]
        state, process = self.state, os.getpid()

        def free(_: object) -> None:
            # In a forked child only the child's view died; the parent may still read the block.
            if os.getpid() == process:
                state[0] = FREE

        state[0] = READ
        self.lease = weakref.ref(lease, free)
        return lease.data


def make_block(number: int, room: int) -> Block:
    """Make a block; OSError on failure."""
    size = FIRST_PAGE + room
    descriptor = os.memfd_create("gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        # Allocate now: if memory were missing at the first write, SIGBUS would kill the process.
        os.posix_fallocate(descriptor, 0, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        block = Block(number, descriptor, room)
        block.descriptors.append(descriptor)
        return block
    except BaseException:
        os.close(descriptor)
        raise


def _mapped(descriptor: int, size: int) -> Memory:
    """A mapped file, without an open descriptor as `mmap.mmap` would keep.

    Torch does the mapping, but no torch operator is called: the sending thread may be inside a
    dispatch mode of the user, which would see it.
    """
    try:
        path = f"/proc/self/fd/{descriptor}"
        storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=size)
    except RuntimeError as error:
        raise OSError(str(error)) from error
    place = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (storage.data_ptr(), False)}
    # The array keeps this object alive, and with it the storage.
    return numpy.asarray(SimpleNamespace(__array_interface__=place, storage=storage))


def _fault_of(descriptor: int, most: int) -> str | None:
    """Why the file must not be mapped, if so: reading a page that was truncated raises SIGBUS."""
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if seals & needed != needed:
        return "its file is not sealed against resizing"
    if seals & ~(needed | fcntl.F_SEAL_SEAL):
        return "its file is sealed against writing"
    file = os.fstat(descriptor)
    if not FIRST_PAGE < file.st_size <= FIRST_PAGE + most:
        return f"its file has {file.st_size} bytes"
    # Reading a hole would allocate its pages, charged to this process.
    if file.st_blocks * 512 < file.st_size:
        return "its file has holes"
    return None


@final
class SharedMemory:
    """The shared memory of one channel: the blocks it lends to the peer, and those it borrows.

    Any thread may call `reserve`, one thread at a time the methods for borrowed blocks. At most
    `limit` bytes are lent, for payloads of `smallest` bytes or more.
    """

    def __init__(self, limit: int = SHARED_AT_MOST, smallest: int = SHARED_FROM) -> None:
        self._limit, self.smallest = limit, smallest
        self.peer_takes_blocks = False
        self._lock = threading.RLock()  # for the blocks that this end makes
        self._is_inside: Callable[[], bool] = cast(Any, self._lock)._is_owned
        """whether this thread holds the lock: then a finalizer or signal handler is asking"""
        self._lent: list[Block] = []  # the least recently used first
        self._making: list[int] = []  # the sizes of those that are being made
        self._numbers = count(1)
        self._is_closed = self._has_warned = False
        self._borrowed: dict[int, Block] = {}
        self.received: Received | None = None
        """the last read that received file descriptors (SCM_RIGHTS), until they are stored"""
        self.unclaimed: deque[int] = deque()
        """received descriptors in order, each for the next frame with a new block"""

    @property
    def lent_bytes(self) -> int:
        """The size of all blocks that this end has made, or is making."""
        return sum(block.room for block in self._lent) + sum(self._making)

    def reserve(self, payload: Sequence[Buffer]) -> Block | None:
        """A block for the payload; None if it must go through the socket.

        hot: benchmarks of bandwidth
        """
        if not payload or not self.peer_takes_blocks:
            return None
        length = sum(map(len, payload))
        if length < max(1, self.smallest):
            return None
        try:
            return self._take(length)
        finally:
            if self._is_closed:
                self._forget()

    def open(
        self, note: Buffer, length: int, limits: Limits, descriptor: int | None = None
    ) -> memoryview:
        """The payload in the block that `note` refers to; BadMessage if there is none."""
        number, is_new = NOTE.unpack(note)
        if is_new:
            self._adopt(number, descriptor, limits)
        block = self._borrowed.get(number)
        if block is None:
            raise BadMessage(f"shared block {number} is unknown")
        if not 0 < length <= block.room:
            raise BadMessage(f"{length} bytes are not in shared block {number} of {block.room}")
        if block.lease() is not None:
            raise BadMessage(f"shared block {number} was reused while it was in use")
        return block.lend(length)

    def close(self) -> None:
        """Forget all blocks, and make no more; tensors in them keep their memory alive.

        Called when no thread sends or receives any more.
        """
        self._is_closed = True
        self._forget()
        self._borrowed.clear()
        while self.unclaimed:
            os.close(self.unclaimed.popleft())

    def keep_descriptors(self, received: Received) -> None:
        """Store the descriptors of a read, and close those that no frame refers to."""
        found = array("i")
        for level, kind, data in received[1]:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
        fresh = found.tolist()
        # In one step: see Note [Reading inside a read] in sockets/channel.py.
        if self.received is received:
            self.received = None
            self.unclaimed += fresh
        while len(self.unclaimed) > _MOST_UNCLAIMED:
            os.close(self.unclaimed.popleft())

    def _adopt(self, number: int, descriptor: int | None, limits: Limits) -> None:
        """Map the peer's block and close the descriptor; BadMessage if mapping it is not safe."""
        if descriptor is None:
            raise BadMessage(
                f"shared block {number} arrived without its descriptor",
                hint="if this process has no free descriptors, raise ulimit -n",
            )
        for known, block in self._borrowed.copy().items():  # an inner read may change it meanwhile
            if block.state[0] == GONE:
                self._borrowed.pop(known, None)
        try:
            fault = _fault_of(descriptor, size_class(limits.payload))
            if fault is not None:
                raise BadMessage(f"shared block {number} is refused: {fault}")
            block = Block(number, descriptor, os.fstat(descriptor).st_size - FIRST_PAGE)
        except OSError as error:
            raise BadMessage(f"shared block {number} cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        if number in self._borrowed or len(self._borrowed) >= MOST_BLOCKS:
            raise BadMessage(f"shared block {number} is known already, or one too many")
        self._borrowed[number] = block

    def _forget(self) -> None:
        # A signal handler may close while its own thread is in `_take`, so this must not wait for
        # the lock: the thread that holds it checks `_is_closed` afterwards.
        if self._is_inside() or not self._lock.acquire(blocking=False):
            return
        try:
            while self._lent:
                self._lent.pop().close()
        finally:
            self._lock.release()

    def _take(self, length: int) -> Block | None:
        if self._is_inside():
            return None
        room = size_class(length)
        with self._lock:
            if self._is_closed or sum(block.unread for block in self._lent) >= MAX_BUFFERED_BYTES:
                return None
            block = self._best_fit(length)
            if block is not None:
                return block.begin(length)
            if not self._has_room_for(room):
                return None
            self._making.append(room)
        return self._made(room, length)

    def _best_fit(self, length: int) -> Block | None:
        """The smallest free block that is large enough; among equals the most recently used."""
        sizes = range(length, _LOOSEST_FIT * length + 1)
        free = [block for block in reversed(self._lent) if block.room in sizes and block.is_free]
        best = min(free, key=lambda block: block.room, default=None)
        if best is not None:
            self._lent.remove(best)
            self._lent.append(best)
        return best

    def _has_room_for(self, room: int) -> bool:
        """Whether a block may be made; drops free blocks for it, the least recently used first."""
        if room > self._limit:
            return False
        free = deque(block for block in self._lent if block.is_free)
        while (
            self.lent_bytes + room > self._limit
            or len(self._lent) + len(self._making) >= MOST_BLOCKS
        ):
            if not free:
                return False
            block = free.popleft()
            block.state[0] = GONE
            block.close()
            self._lent.remove(block)
        return True

    def _made(self, room: int, length: int) -> Block | None:
        block = None
        try:
            block = make_block(next(self._numbers), room).begin(length)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                text = "cannot allocate %d bytes of shared memory, using the socket: %s"
                _log.warning(text, room, error)
        finally:
            with self._lock:
                self._making.remove(room)
                if block is not None:
                    self._lent.append(block)
        return block
