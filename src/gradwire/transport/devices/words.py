"""A page that the owner of device blocks and their peer both map: which blocks are in use.

One byte per block. The owner sets it when the block is named in a message, the peer when it has
queued its copies or has dropped the message; neither needs a message, a lock or a thread. Further
on are the marks of each block, which devices write (contract.py). The page is a sealed memfd, so a
killed process leaves nothing behind. The peer opens it through /proc.

The address of a page comes from a peer, and could name any file of any process of this user. So
nothing is opened that is not a memfd of gradwire, and nothing is written before the page has shown
the key that the message announced: only its owner knows it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Self, final

import msgspec

from gradwire.errors import BadMessage

MOST_BLOCKS = 128
"""blocks that one worker makes for one peer"""
TAKEN, UNREAD, IN_USE = range(3)
"""IN_USE from when a block is leased until its tensors were taken or its message was dropped"""
_NAME = "gradwire-words"
_KEY_BYTES = 32
_SIZE = mmap.PAGESIZE
_MARKS = 1024
"""where in the page the marks begin"""
USE, READY, FREE = range(3)
"""the marks of a block: its latest use, as the owner's host counts them; the latest that the
owner's device has filled, and that the peer's device has taken out
"""
_MARK_BYTES = 4
_BITS = (1 << 32) - 1
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class PageAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where the peer finds a page, and what it must contain."""

    process: int
    descriptor: int
    key: bytes


@final
class Words:
    """One mapped page."""

    def __init__(self, page: mmap.mmap, descriptor: int | None, key: bytes) -> None:
        self._page, self._descriptor, self._key = page, descriptor, key
        self.place = ctypes.addressof(ctypes.c_char.from_buffer(page))
        """the address in this process"""
        self.unpin: Callable[[], object] | None = None
        """set by a driver that has made the page known to its devices"""

    @classmethod
    def make(cls) -> Self:
        """A new page. OSError if the system has none."""
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, _SIZE)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            page = mmap.mmap(descriptor, _SIZE)
        except BaseException:
            os.close(descriptor)
            raise
        key = secrets.token_bytes(_KEY_BYTES)
        page[:_KEY_BYTES] = key
        return cls(page, descriptor, key)

    @classmethod
    def open(cls, address: PageAddress) -> Self:
        """The page of a peer; BadMessage if it is none, OSError if it cannot be reached."""
        path = f"/proc/{address.process}/fd/{address.descriptor}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise BadMessage("a page of block words is no file of gradwire")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            file = os.fstat(descriptor)
            is_page = stat.S_ISREG(file.st_mode) and file.st_size == _SIZE
            if not is_page or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) != _SEALS:
                raise BadMessage("a page of block words is not sealed, or has another size")
            page = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        if len(address.key) != _KEY_BYTES or page[:_KEY_BYTES] != address.key:
            page.close()
            raise BadMessage("a page of block words has another key than was announced")
        return cls(page, None, address.key)

    @property
    def address(self) -> PageAddress:
        """For the peer to open it."""
        assert self._descriptor is not None, "a peer's page is not passed on"
        return PageAddress(os.getpid(), self._descriptor, self._key)

    def __getitem__(self, index: int) -> int:
        """TAKEN, UNREAD or IN_USE."""
        return self._page[_KEY_BYTES + index]

    def __setitem__(self, index: int, word: int) -> None:
        self._page[_KEY_BYTES + index] = word

    def marks(self, index: int) -> Marks:
        """Those of a block."""
        first = _MARKS + index * 3 * _MARK_BYTES
        numbers = memoryview(self._page)[first : first + 3 * _MARK_BYTES].cast("I")
        return Marks(self, numbers, first)

    def close(self) -> None:
        """Unmap it. What the other end writes later does no harm: it has its own mapping."""
        if self.unpin is not None:
            self.unpin()
            self.unpin = None
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


@final
class Marks:
    """How far the two ends of one block have come. A number counts on from 0 after 2**32 - 1."""

    def __init__(self, words: Words, numbers: memoryview, offset: int) -> None:
        self.words, self._numbers, self._offset = words, numbers, offset

    def offset_of(self, which: int) -> int:
        """Where in the page this mark is."""
        return self._offset + which * _MARK_BYTES

    def __getitem__(self, which: int) -> int:
        """USE, READY or FREE."""
        return self._numbers[which]

    def __setitem__(self, which: int, number: int) -> None:
        self._numbers[which] = number & _BITS

    def has_come(self, which: int, number: int) -> bool:
        """Whether a mark has come so far, as devices compare them. hot: every block"""
        return (self._numbers[which] - number) & _BITS < 1 << 31


assert _KEY_BYTES + MOST_BLOCKS <= _MARKS, "a page has a byte for each block"
assert _MARKS + MOST_BLOCKS * 3 * _MARK_BYTES <= _SIZE, "and its marks"
