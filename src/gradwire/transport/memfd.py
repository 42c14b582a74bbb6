"""A block of memory that two processes map: an anonymous file (memfd), freed with its last user.

    page 0   its first byte is the state
    page 1…  the payload

One end makes the block and fills it, the other borrows it. The state says which end may use it:

    FREE   the maker may fill or drop it
    SENT   filled and announced, not yet received
    READ   received; views of it are alive
    GONE   dropped by its maker; the borrower forgets it when it next looks

The borrower returns a block by writing one byte. A finalizer does so, and it can run anywhere, so
it must not do more. All reads of the block happen before that write, because the reference count
of the last view falls to zero first.

A descriptor comes from a peer, and `adopt` trusts nothing about it. Both ends can write to a block
at any time; workers of one user trust each other not to do so while it is lent. A forked child
shares the blocks of its parent: it must copy what it wants to keep.
"""

from __future__ import annotations

import fcntl
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Final, TypeAlias, final

import numpy
import torch
from numpy.typing import NDArray

from gradwire.errors import BadMessage
from gradwire.wire.message import Buffer

_Memory: TypeAlias = NDArray[numpy.uint8]

FREE, SENT, READ, GONE = range(4)
FIRST_PAGE: Final = 4096
_COPIED_WITHOUT_GIL: Final = 1 << 15


def can_share() -> bool:
    """Whether this system has memfd, and /proc to map it by path."""
    return (
        sys.platform == "linux" and hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
    )


@final
class Block:
    """A mapped block; it is unmapped when neither it nor a view of it is referenced."""

    __slots__ = ("_lease", "_memory", "_state", "number", "room")

    def __init__(self, number: int, descriptor: int, room: int) -> None:
        self.number = number
        self.room = room
        self._memory: _Memory = numpy.asarray(_Mapping(descriptor, FIRST_PAGE + room))
        self._state = self._memory.data[:1]
        self._lease: weakref.ref[_Memory] | None = None

    @property
    def state(self) -> int:
        """FREE, SENT, READ or GONE; the peer may change it at any time."""
        return self._state[0]

    @state.setter
    def state(self, state: int) -> None:
        self._state[0] = state

    @property
    def is_lent(self) -> bool:
        """Whether the view returned by `lend`, or a slice of it, is alive."""
        return self._lease is not None and self._lease() is not None

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
        state, process = self._state, os.getpid()

        def free(_: object) -> None:
            # In a forked child only the child's view died; the parent may still read the block.
            if os.getpid() == process:
                state[0] = FREE

        self.state = READ
        self._lease = weakref.ref(lease, free)
        return lease.data


def make_block(number: int, room: int) -> tuple[Block, int]:
    """Make a block; returns it and its descriptor, which the caller closes. OSError on failure."""
    size = FIRST_PAGE + room
    descriptor = os.memfd_create("gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        # Allocate now: if memory were missing at the first write, SIGBUS would kill the process.
        os.posix_fallocate(descriptor, 0, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return Block(number, descriptor, room), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def adopt(number: int, descriptor: int, most: int) -> Block:
    """Map the peer's block and close the descriptor; BadMessage if mapping it is not safe.

    `most` is the largest accepted size.
    """
    try:
        fault = _fault_of(descriptor, most)
        if fault is not None:
            raise BadMessage(f"shared block {number} is refused: {fault}")
        return Block(number, descriptor, os.fstat(descriptor).st_size - FIRST_PAGE)
    except OSError as error:
        raise BadMessage(f"shared block {number} cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)


@final
class _Mapping:
    """A mapped file that keeps no descriptor open, as `mmap.mmap` would.

    Torch does the mapping, but no torch operator is called: the sending thread may be inside a
    dispatch mode of the user, which would see it.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        try:
            path = f"/proc/self/fd/{descriptor}"
            self._storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=size)
        except RuntimeError as error:
            raise OSError(str(error)) from error
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (self._storage.data_ptr(), False),
        }


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
