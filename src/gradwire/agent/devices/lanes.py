"""The blocks of device memory between this worker and one peer.

OutgoingLane   makes blocks, and fills them with the tensors of messages to the peer
IncomingLane   maps the peer's blocks, and takes tensors out of them

The peer maps each new block by a request of its own. This is also the probe: the owner writes
random bytes into the block, and the peer answers with what it reads there. If that fails (another
machine or container, a device that the peer does not see), tensors go through host memory.

Note [A peer that died]: if a process is killed before its device has filled or read a block,
streams here wait for it. They are let go when it has ended. What is computed here from a block that
was not filled is wrong then, NaN for most dtypes, and the log says so.

Note [Who frees a block]: memory must not be freed while another process maps it; CUDA leaves open
what happens then. So the owner frees a block when the peer has unmapped it, or its process has
ended. If the connection is lost and the process lives, the block is kept until that process ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from threading import RLock
from typing import Any, NamedTuple, cast, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from gradwire.agent.messages import BlockOpened, OpenBlock
from gradwire.errors import BadMessage, UsageError
from gradwire.transport.devices.contract import (
    BLOCK_ALIGNMENT,
    DeviceBlock,
    DeviceDriver,
    DeviceError,
)
from gradwire.transport.devices.pool_state import DevicePool, room_for
from gradwire.transport.devices.words import IN_USE, MOST_BLOCKS, TAKEN, UNREAD, Words
from gradwire.wire.tensor import Layout

_log = logging.getLogger("gradwire")
_PROOF_BYTES = 64
_PAUSE = 0.01
_LONGEST_SECONDS = 60.0
"""How long blocks of a link that is over may be needed. Then they stay, and the log says so."""
_THREADS = 16
"""the number of a process's threads in its /proc/…/stat, counted from after the state"""
_numbers = count(secrets.randbits(48))
"""Not from 1: what a lost worker named is then unknown in the process that takes its place."""

AskPeer = Callable[[OpenBlock, float], BlockOpened]
"""Sends an OpenBlock, and waits for the answer until the deadline."""


Busy = list[None]
"""An entry for each thread that uses blocks of a lane, which are not freed meanwhile. A list can be
changed without a lock.
"""


class Shared(NamedTuple):
    """A block, and the number of its byte in the page of words."""

    block: DeviceBlock
    word: int


@final
class Lease:
    """A block while one message is encoded into it."""

    __slots__ = ("_block", "_busy", "_end", "_stream", "number")

    def __init__(self, number: int, block: DeviceBlock, stream: object, busy: Busy) -> None:
        self.number, self._block, self._stream, self._end = number, block, stream, 0
        self._busy: Busy | None = busy

    def append(self, tensor: Tensor) -> tuple[int, int]:
        """Copy a contiguous tensor into the block; returns its place for the header."""
        offset = self._end
        self._block.fill(offset, tensor, self._stream)
        self._end = offset + aligned(tensor.nbytes)
        return self.number, offset

    def close(self) -> None:
        """All tensors of the message are in the block."""
        self._block.filled(self._stream)
        self.end()

    def end(self) -> None:
        """The block is not used any more here, or was not before."""
        if self._busy is not None:
            self._busy.pop()
            self._busy = None


def aligned(nbytes: int) -> int:
    """The bytes that a tensor of this size takes in a block."""
    return -(-nbytes // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


def is_inside(block: DeviceBlock, offset: int, nbytes: int) -> bool:
    """Whether a tensor can be at this place, which a peer has named."""
    return not offset % BLOCK_ALIGNMENT and 0 <= offset <= block.room - nbytes


_lanes: WeakValueDictionary[bytes, OutgoingLane] = WeakValueDictionary()
"""All of this process, by the keys of their pages. A process cannot map its own memory again, so
two workers of one process use the same block objects. Only who has seen the key finds a lane.
"""


@final
class OutgoingLane:
    """The blocks that this worker makes for one peer."""

    def __init__(self, ask: AskPeer, lock: RLock, about: str) -> None:
        self._ask, self._lock, self._about = ask, lock, about
        self._is_inside: Callable[[], bool] = cast(Any, lock)._is_owned
        self.words = Words.make()
        self.blocks: dict[int, Shared] = {}
        self.filled_bytes = 0  # of messages, also of the few that did not leave
        self._busy: Busy = []
        self._pools: dict[torch.device, DevicePool] = {}
        self._indices = set(range(MOST_BLOCKS))
        self._refused: set[torch.device] = set()
        self._has_said: set[torch.device] = set()
        self._process = os.getpid()
        """of the peer, once it has mapped a block"""
        self._is_closed = False
        _lanes[self.words.address.key] = self

    def lease(
        self, driver: DeviceDriver, device: torch.device, length: int, deadline: float
    ) -> Lease | None:
        """A block for a message with so many bytes on this device; None if there is none."""
        # A finalizer that interrupts the locked part must not change what that part looks at.
        if device in self._refused or self._is_inside():
            return None
        self._busy.append(None)
        lease = None
        try:
            lease = self._maybe_lease(driver, device, length, deadline)
        finally:
            if lease is None:
                self._busy.pop()
        return lease

    def _maybe_lease(
        self, driver: DeviceDriver, device: torch.device, length: int, deadline: float
    ) -> Lease | None:
        with self._lock:
            pool = self._pools.get(device)
            if pool is None:
                pool = self._pools[device] = DevicePool(driver.budget_of(device))
            n = pool.choose(length, self._is_free)
            was_taken = True
            if n is not None:
                block, word = self.blocks[n]
                was_taken = self.words[word] == TAKEN
                self.words[word] = IN_USE
        if n is None:
            made = self._make(driver, device, pool, room_for(length), deadline)
            if made is None:
                return None
            n, block = made
        stream = driver.current_stream(device)
        block.begin(stream, was_taken=was_taken)
        self.filled_bytes += length
        return Lease(n, block, stream, self._busy)

    def give_back(self, number: int) -> None:
        """The message that names this block did not leave."""
        shared = self.blocks.get(number)
        if shared is not None:
            self.words[shared.word] = UNREAD

    def close(self) -> None:
        """Make no more blocks, and free these: see Note [Who frees a block]."""
        with self._lock:
            self._is_closed = True
            blocks, self.blocks = [shared.block for shared in self.blocks.values()], {}
        if _let_go(blocks, self._process, self._busy, self._about) is None:
            _stuck.append((blocks, self.words))
            return
        _kept.append(KeptBlocks(self._process, blocks, self.words))
        free_kept_blocks()

    def _is_free(self, number: int) -> bool:
        shared = self.blocks.get(number)  # none while it is being made
        return shared is not None and self.words[shared.word] != IN_USE

    def _make(
        self,
        driver: DeviceDriver,
        device: torch.device,
        pool: DevicePool,
        room: int,
        deadline: float,
    ) -> tuple[int, DeviceBlock] | None:
        with self._lock:
            if self._is_closed or not self._indices or not pool.may_make(room):
                self._say_once(device, "all blocks for this peer are in use, and may be no more")
                return None
            number, index = next(_numbers), self._indices.pop()
            pool.added(number, room)
            self.words[index] = IN_USE
        free_kept_blocks()
        is_open = False
        try:
            block = driver.make(device, room, self.words.marks(index))
            self.blocks[number] = Shared(block, index)  # a worker of this process finds it here
            self._open(driver, number, deadline)
            is_open = True
        except (DeviceError, OSError) as error:
            self._refused.add(device)
            self._say_once(device, str(error))
        except UsageError:
            # A finalizer may not wait for the answer. Its message goes through host memory.
            _log.debug("%s: a block could not be shared now", self._about, exc_info=True)
        finally:
            if not is_open:
                self._unmake(pool, number, index)
        return (number, block) if is_open else None

    def _say_once(self, device: torch.device, why: str) -> None:
        if device not in self._has_said:
            self._has_said.add(device)
            text = "%s: tensors on %s go through host memory: %s"
            _log.warning(text, self._about, device, why)

    def _open(self, driver: DeviceDriver, number: int, deadline: float) -> None:
        """Let the peer map a block; DeviceError if it cannot, or maps other memory."""
        block, index = self.blocks[number]
        proof = secrets.token_bytes(_PROOF_BYTES)
        block.write(proof)
        uuid, page = driver.uuid_of(block.device), self.words.address
        about = (number, index, driver.kind, uuid, block.room, block.handle, page)
        opened = self._ask(OpenBlock(*about), deadline)
        if opened.proof != proof:
            raise DeviceError(opened.refusal or "the peer has mapped other memory")
        self._process = opened.process

    def _unmake(self, pool: DevicePool, number: int, index: int) -> None:
        with self._lock:
            pool.removed(number)
            shared = self.blocks.pop(number, None)
            self._indices.add(index)
        if shared is not None:
            # The peer may have mapped it, if only its answer was lost.
            _kept.append(KeptBlocks(self._process, [shared.block], None))


class KeptBlocks(NamedTuple):
    """Blocks of a link that is over, which a process may still map."""

    process: int
    blocks: list[DeviceBlock]
    words: Words | None
    """to be closed after them"""


_kept: list[KeptBlocks] = []
"""of all workers of this process, which may be closed by now"""


_stuck: list[object] = []
"""blocks and pages that a device may still use: neither is ever unmapped"""


def free_kept_blocks() -> None:
    """Free those that no other process maps any more."""
    for kept in list(_kept):
        if kept.process != os.getpid() and _is_alive(kept.process):
            continue
        with suppress(ValueError):  # another thread frees them
            _kept.remove(kept)
            for block in kept.blocks:
                _release(block)
            if kept.words is not None:
                kept.words.close()


def _is_alive(process: int) -> bool:
    """Whether a thread of it runs; one that has ended and was not waited for yet does not."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            state, *numbers = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    return state not in (b"Z", b"X") or int(numbers[_THREADS]) > 1


def _let_go(blocks: Sequence[DeviceBlock], process: int, busy: Busy, about: str) -> bool | None:
    """Wait until no thread or stream needs the blocks of a link that is over; None if in vain.

    True if streams waited for a peer that has ended, see Note [A peer that died]. As long as its
    process lives, so does its device work.
    """
    was_lost, deadline = False, time.monotonic() + _LONGEST_SECONDS
    while time.monotonic() < deadline:
        behind = [block for block in blocks if block.is_behind()]
        if behind and not _is_alive(process):
            was_lost = True
            for block in behind:
                block.abandon()
        elif not behind and not busy:
            return was_lost
        else:
            time.sleep(_PAUSE)
    text = "%s: %d blocks of device memory are still in use %g s after the link was lost: they stay"
    _log.error(text, about, len(blocks), _LONGEST_SECONDS)
    return None


def _release(block: DeviceBlock) -> None:
    try:
        block.release()
    except Exception:  # the device itself may be broken: nothing else depends on it
        _log.debug("a block of device memory could not be released", exc_info=True)


@final
class IncomingLane:
    """The peer's blocks that this worker has mapped."""

    def __init__(self, lock: RLock, about: str) -> None:
        self._lock, self._about = lock, about
        self._process = os.getpid()
        """of the peer, once it has shared a block"""
        self.blocks: dict[int, Shared] = {}
        self.taken_bytes = 0
        self.busy: Busy = []
        self._words: Words | None = None
        self._is_here = False
        """whether the peer is a worker of this process: then nothing is mapped twice"""
        self._is_closed = False

    def open(self, message: OpenBlock, driver: DeviceDriver) -> BlockOpened:
        """Map a block; every field of the message comes from the peer."""
        words = {shared.word for shared in self.blocks.values()}
        is_known = message.number in self.blocks or message.index in words
        if is_known or not 0 <= message.index < MOST_BLOCKS:
            raise BadMessage(f"block {message.number} is known already, or one too many")
        device = driver.device_with(message.uuid)
        if device is None:
            raise DeviceError(f"the peer does not see the {message.kind} device {message.uuid}")
        owner = _lanes.get(message.page.key)
        if owner is not None:
            self._is_here, self._words = True, owner.words
            block = owner.blocks[message.number].block
        else:
            if self._words is None:
                self._words, self._process = Words.open(message.page), message.page.process
            marks = self._words.marks(message.index)
            block = driver.open(device, message.room, message.handle, marks)
        opened = BlockOpened(block.read(_PROOF_BYTES), os.getpid())
        with self._lock:
            if not self._is_closed:
                self.blocks[message.number] = Shared(block, message.index)
                return opened
        if not self._is_here:
            _release(block)
        raise DeviceError("the connection was lost meanwhile")

    def find(self, number: int) -> Shared:
        """A block of the peer; BadMessage if it is not mapped."""
        shared = self.blocks.get(number)
        if shared is None:
            raise BadMessage(f"a tensor lies in device block {number}, which is not mapped here")
        return shared

    def take(
        self,
        number: int,
        places: Iterable[tuple[int, Layout]],
        to: torch.device,
        stream: object,
    ) -> list[Tensor]:
        """The tensors at these offsets of a block, and give it back. hot: see links.py"""
        self.busy.append(None)
        try:
            block, word = self.find(number)
            block.begin_taking(stream)
            try:
                tensors = []
                for offset, layout in places:
                    tensors.append(block.take(offset, layout, to, stream))
                    self.taken_bytes += aligned(layout.nbytes)
                return tensors
            finally:
                block.taken(stream)
                assert self._words is not None, "it came with the block"
                self._words[word] = TAKEN
        finally:
            self.busy.pop()

    def give_back(self, numbers: Iterable[int], word: int) -> None:
        """The owner may fill these blocks again: they are TAKEN, or UNREAD."""
        for number in numbers:
            shared = self.blocks.get(number)
            if shared is not None and self._words is not None:
                self._words[shared.word] = word

    def close(self) -> None:
        """Unmap all blocks. This waits for copies out of them that the device has not made yet."""
        with self._lock:
            self._is_closed = True
            shared, self.blocks = self.blocks, {}
        if self._is_here or self._words is None:
            return
        blocks = [each.block for each in shared.values()]
        was_lost = _let_go(blocks, self._process, self.busy, self._about)
        if was_lost is None:
            _stuck.append((blocks, self._words))
            return
        if was_lost:
            text = "%s: the peer died before its device was done; tensors of it are lost"
            _log.error(text, self._about)
        for block in blocks:
            _release(block)
        self._words.close()


@final
class Taking:
    """The blocks that one message names, while it is decoded."""

    def __init__(self, lane: IncomingLane, stream_of: Callable[[torch.device], object]) -> None:
        self._lane, self._stream_of = lane, stream_of
        self._begun: dict[int, tuple[DeviceBlock, object]] = {}
        """with the stream on which the tensors are taken"""
        lane.busy.append(None)

    def take(self, place: tuple[int, int], layout: Layout, to: torch.device) -> Tensor:
        """A new tensor on that device, with what lies at this place."""
        number, offset = place
        block = self._lane.find(number).block
        if not is_inside(block, offset, layout.nbytes):
            raise BadMessage(f"bytes at {offset} are outside of device block {number}")
        if number not in self._begun:
            stream = self._stream_of(block.device)
            block.begin_taking(stream)
            self._begun[number] = block, stream
        tensor = block.take(offset, layout, to, self._begun[number][1])
        self._lane.taken_bytes += aligned(layout.nbytes)
        return tensor

    def close(self, named: Iterable[int]) -> None:
        """The copies are queued: give back all blocks that the message names."""
        try:
            for block, stream in self._begun.values():
                block.taken(stream)
            self._lane.give_back(self._begun, TAKEN)
            self._lane.give_back(set(named) - self._begun.keys(), UNREAD)  # it does not decode
        finally:
            self._lane.busy.pop()
