"""A block of memory that two processes map: a file without a name, gone with its last user.

    page 0   its first byte is the state
    page 1…  the payload

One end makes the block and fills it, the other only borrows it. The state says whose it is:

    FREE   the maker's, to fill or to drop
    SENT   filled and announced, not yet received
    READ   received; views of it are alive
    GONE   dropped by its maker; the borrower forgets it when it next looks

So a block goes home by the write of one byte. That is all a finalizer may do, for it can run
anywhere. No reader's last look can come after that byte: the reference count that had to fall first
orders the two.

A descriptor comes from a peer: `adopt` believes nothing about it. Both ends can write to a block at
all times; that the maker does not while it is lent is a promise between workers of one user. A
forked child shares the blocks of its parent: it must copy what it wants to keep.
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
from gradwire.wire.frame import Buffer

_Memory: TypeAlias = NDArray[numpy.uint8]

FREE, SENT, READ, GONE = range(4)
FIRST_PAGE: Final = 4096
_COPIED_WITHOUT_GIL: Final = 1 << 15


def can_share() -> bool:
    """Whether this system has files without names, and shows a process its own."""
    return (
        sys.platform == "linux" and hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
    )


@final
class Block:
    """A mapped block; its memory goes when nobody refers to it and to no view of it."""

    __slots__ = ("_lease", "_memory", "_state", "number", "room")

    def __init__(self, number: int, descriptor: int, room: int) -> None:
        self.number = number
        self.room = room
        self._memory: _Memory = numpy.asarray(_Mapping(descriptor, FIRST_PAGE + room))
        self._state = self._memory.data[:1]
        self._lease: weakref.ref[_Memory] | None = None

    @property
    def state(self) -> int:
        """Whose it is; the peer may change it at any time."""
        return self._state[0]

    @state.setter
    def state(self, state: int) -> None:
        self._state[0] = state

    @property
    def is_lent(self) -> bool:
        """Whether a view that `lend` gave is still alive, or one sliced from it."""
        return self._lease is not None and self._lease() is not None

    def fill(self, payload: Sequence[Buffer]) -> None:
        """Copy the parts one after the other: the only copy that is made of them."""
        start = FIRST_PAGE
        for part in payload:
            end = start + len(part)
            if len(part) >= _COPIED_WITHOUT_GIL:
                self._memory[start:end] = numpy.frombuffer(part, dtype=numpy.uint8)
            else:
                self._memory.data[start:end] = part
            start = end

    def lend(self, nbytes: int) -> memoryview:
        """The first `nbytes` of the payload; the block is FREE again when their last view died."""
        # A view of a view refers to the array, not to the memoryview it was sliced from; so it is
        # the array whose death counts.
        lease = self._memory[FIRST_PAGE : FIRST_PAGE + nbytes]
        state, process = self._state, os.getpid()

        def free(_: object) -> None:
            # In a forked child it is only the child's view that died.
            if os.getpid() == process:
                state[0] = FREE

        self.state = READ
        self._lease = weakref.ref(lease, free)
        return lease.data


def make(number: int, room: int) -> tuple[Block, int]:
    """A new block and its descriptor, which the caller closes; OSError if it cannot be had."""
    size = FIRST_PAGE + room
    descriptor = os.memfd_create("gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        # Memory that turns out to be missing only when it is written to would kill the process.
        os.posix_fallocate(descriptor, 0, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return Block(number, descriptor, room), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def adopt(number: int, descriptor: int, most: int) -> Block:
    """The peer's block behind a descriptor, which is closed; BadMessage if it could hurt us.

    `most` is the largest size that is believed.
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
    """The bytes of a file, without holding on to a descriptor as `mmap.mmap` would.

    Torch does the mapping, but no operator of its is called: the thread that sends may be in some
    mode of the user's that would see it.
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
    """Why the file must not be mapped: to touch a page that it lost would kill the process."""
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if seals & needed != needed:
        return "its file is not sealed against resizing"
    if seals & ~(needed | fcntl.F_SEAL_SEAL):
        return "its file is sealed against writing"
    file = os.fstat(descriptor)
    if not FIRST_PAGE < file.st_size <= FIRST_PAGE + most:
        return f"its file has {file.st_size} bytes"
    # What the peer has not paid for would be allocated here, page by page, as it is read.
    if file.st_blocks * 512 < file.st_size:
        return "its file has holes"
    return None
