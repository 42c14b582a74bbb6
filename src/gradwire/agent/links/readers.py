"""Which thread reads each channel: one of its own, or a thread that waits for an answer on it.

Waking a thread costs more than all the rest of a small call. Two rules avoid most wake-ups:

    a thread that waits for an answer reads the channel itself for a while, if no thread does
    a reader thread that receives a request which is known to be short runs it itself

A thread reads a channel only while it holds the channel's *read lock*. The lock is free while a
reader thread runs a request, and between two calls of a thread that read for itself: then nobody
reads. The *watchdog* covers these gaps. Every 2 ms it looks at the channels that were in use
lately, handles what has come, and makes sure that a thread reads. It skips those on which much was
read since its last look. While all are that busy, it doubles its interval, up to 8 ms, as each look
takes the GIL from the threads that make the calls. So a frame that no thread waits for is read
within 16 ms, mostly 2 ms, even while a long request runs. A channel that is quiet for two looks
gets a reader thread that blocks in it. When all have one, the watchdog sleeps too.

A signal handler or a finalizer may run while its own thread holds a read lock, and wait for
something. No other thread can read that channel meanwhile, so the inner wait reads it, even if its
answer comes on another channel (see Note [Reading inside a read] in transport/sockets/channel.py).
A thread never holds two read locks.

Note [Interrupts in the readers]: a finalizer or a signal handler may also run in the middle of the
code of this file, and call into it again. CPython runs them only after a call, at a backward jump,
or (finalizers) where a container is made; never inside a run of plain loads and stores. This file
relies on that:
  1. It uses no lock but the read locks, which are only tried, never waited for. With a lock, the
     interrupting code would wait for the code that it interrupts.
  2. Lists and dicts are changed by single calls into C (`append`, `pop`), which the GIL makes
     atomic. A list of `None`s, such as `threads`, is a counter that needs no lock.
  3. A thread is woken by a SimpleQueue, whose `put` is reentrant. `threading.Event.set` is not: it
     holds a lock.
  4. A read lock is taken by `for has_lock in reader.lock_attempts: break`. One instruction of the
     interpreter tries the lock and stores the result (see `threads.taking`), so whenever this
     thread holds the lock, `has_lock` is true.
  5. No call lies between a line marked "one step" and the line before it, so no interrupt runs
     there (a trace function may).
  6. If the interrupting code waits, the interrupted reader thread or watchdog does not work
     meanwhile. `hand_over` first gives its work to another thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from operator import call
from queue import SimpleQueue
from typing import NoReturn, final

from gradwire import threads
from gradwire.agent.serving.thread_pool import Job
from gradwire.errors import BadMessage, GradwireError, PeerLost, UsageError
from gradwire.ids import WorkerId
from gradwire.threads import FORKED, MAKE_IT_ELSEWHERE, check_may_wait, mine, taking
from gradwire.transport.base import Channel, Reentered
from gradwire.transport.sockets.writer import reacquire_send_locks, release_send_locks
from gradwire.wire.message import IS_ANSWER, Frame

_log = logging.getLogger("gradwire")

_TICK_SECONDS = 0.002
_LONGEST_TICK_SECONDS = 0.008
_TICKS_UNTIL_IDLE = 2
_READS_OF_BUSY_CHANNEL = 8  # from one look of the watchdog to the next
_LOOKS_INSIDE_SECONDS = 1.0
_READS_FOR_ITSELF_SECONDS = 0.02  # how long a waiting thread reads before it blocks on its promise
_READS_AT_ONCE = 64  # frames that `read_some` handles at most

IsDone = Callable[[], bool]
Block = Callable[[], object]
OnFrame = Callable[[WorkerId, Channel, Frame, bool], Job | None]
"""Handles a frame; returns a job if the thread that read the frame may and should run it."""
OnEnd = Callable[["ChannelReader", GradwireError], None]


@final
class ChannelReader:
    """One channel, and the state of the threads that read it."""

    may_wait = True

    def __init__(self, worker: WorkerId, channel: Channel, owner: ChannelReaders) -> None:
        self.worker, self.channel, self.owner = worker, channel, owner
        self.read_lock = threading.Lock()
        self.lock_attempts: Iterator[bool] = taking(self.read_lock)
        """each step tries the read lock; see Note [Interrupts in the readers]"""
        self.waiting: list[IsDone] = []  # the conditions that threads wait for on this channel
        self.reads = self.seen = channel.frames_received
        """frames handled so far, and at the last look of the watchdog"""
        self.idle_ticks = 0
        self.threads: list[None] = []  # one entry for each reader thread
        self.running: list[None] = []
        """one entry for each reader thread that runs a job, or was interrupted between frames"""
        self.idle: list[SimpleQueue[None]] = []
        """wake queues of sleeping reader threads; to wake one, remove its queue and put an item"""
        self.has_ended = False
        self.own_thread_reads = False
        """whether a reader thread holds the read lock, so that it will see the next frame"""

    def is_wanted(self) -> bool:
        """Whether a thread still waits for something on this channel."""
        return not all(map(call, tuple(self.waiting)))

    def has_lost_a_frame(self) -> bool:
        """Whether a frame was taken from the channel and not handled; for the lock's holder.

        The channel counts what it hands out. A local variable could not tell: an interrupt may come
        after `maybe_recv` has taken a frame and before its result is stored.
        """
        return self.channel.frames_received != self.reads

    def hand_over(self, waits_on: object) -> threads.Undo | None:
        """The calling reader thread is about to wait on a channel: let another thread read here."""
        this_thread = _this_thread.state or _new_state()
        if this_thread.reads is not None:
            return None  # it holds a read lock, so the wait itself reads on
        if this_thread.runs:  # already counted in `running`
            if self is not waits_on:
                self.owner.ensure_reader(self)
            return None
        # It was interrupted between two frames, or on its way into or out of its sleep, and cannot
        # read now. Its wake queue leaves the idle list, so that nobody wakes this thread instead of
        # one that can read. If the queue is not in the list, this thread was just woken to read, or
        # does not sleep yet. Mark it busy, so that `ensure_reader` finds a replacement and does not
        # rely on it.
        wake = this_thread.wake
        if wake is not None:
            with suppress(ValueError):
                self.idle.remove(wake)
        self.running.append(None)
        self.owner.ensure_reader(self)
        return partial(self._resume, wake)

    def _resume(self, wake: SimpleQueue[None] | None) -> None:
        self.running.pop()
        if wake is not None:  # nobody else will wake the thread: its queue is not in the idle list
            wake.put(None)


@final
class _ThreadState:
    """What one thread does now; not per worker: a finalizer on it may call as another one.

    A store into it does not allocate, so it cannot be interrupted.
    """

    __slots__ = ("reads", "runs", "wake")

    def __init__(self) -> None:
        self.runs = False  # whether it is a reader thread that runs a job
        self.reads: ChannelReader | None = None  # whose read lock it holds
        self.wake: SimpleQueue[None] | None = None
        """its wake queue, from before it sleeps until it is awake"""


class _ThisThread(threading.local):
    state: _ThreadState | None = None


_this_thread = _ThisThread()


def _new_state() -> _ThreadState:
    """The state of this thread, which had none.

    Code that interrupts this one may make another, but does not use it any more when this goes on.
    """
    state = _this_thread.state = _ThreadState()
    return state


@final
class ChannelReaders:
    """The channel readers of one worker, and the watchdog over them."""

    may_wait = True

    def __init__(self, spawn: threads.Spawn, on_frame: OnFrame, on_end: OnEnd) -> None:
        self._spawn, self._on_frame, self._on_end = spawn, on_frame, on_end
        self._by_channel: dict[Channel, ChannelReader] = {}
        self._watched: dict[ChannelReader, None] = {}
        """those the watchdog looks at; a dict, as its order is deterministic and a set's is not"""
        self._wake_watchdog: SimpleQueue[None] = SimpleQueue()
        self._watchdog: object | None = None
        """the token of the current watchdog thread; a thread with an older one ends"""
        self._is_watching = self._closed = False

    def open(self, worker: WorkerId, channel: Channel, name: str) -> None:
        """Read this channel from now on."""
        if self._watchdog is None and not self._closed:
            self._spawn_watchdog()
        # After the `append` and before the `spawn`, `threads` counts a thread that does not exist.
        # A finalizer that waited there would rely on it, so none runs meanwhile.
        with threads.no_collection():
            reader = self._by_channel[channel] = ChannelReader(worker, channel, self)
            reader.threads.append(None)
            self._spawn(f"read {name}", lambda: self._read(reader), reader)

    def all(self) -> list[ChannelReader]:
        """Every reader whose channel has not ended."""
        return list(self._by_channel.values())

    def close(self) -> None:
        """Wake every thread, so that it sees that its channel was closed."""
        self._closed = True
        for reader in tuple(self._by_channel.values()):
            self._mark_ended(reader)
        self._wake_watchdog.put(None)

    def _mark_ended(self, reader: ChannelReader) -> None:
        reader.has_ended = True  # before the idle list is emptied: see `_sleep`
        while self._maybe_wake(reader):
            pass

    def forked(self) -> None:
        """In a forked process, which has none of the threads: read nothing, and refuse to wait."""
        self._closed = True
        self.wait = refuse_to_wait  # type: ignore[method-assign,assignment]

    def wait(self, channel: Channel | None, done: IsDone, block: Block) -> None:
        """Wait until `done`: read the channel for a while if no thread does, then call `block`."""
        reader = self._by_channel.get(channel)  # type: ignore[arg-type]  # None has no reader
        this_thread, duty = _this_thread.state or _new_state(), mine.duty
        held = this_thread.reads
        undo = duty.hand_over(reader) if duty is not None else None
        if reader is not None:  # before anything is read: a reader thread asks for it after a frame
            reader.waiting.append(done)
        try:
            if reader is None or held or not self._maybe_read_for(reader, this_thread, done):
                self._wait_longer(reader, held, done, block)
        finally:
            if reader is not None:
                reader.waiting.remove(done)
            if undo is not None:
                undo()

    def read_some(self, channel: Channel) -> None:
        """Handle what has come, if no thread reads.

        A thread that makes many calls before it waits reads their answers now and then: to wake
        another thread for them costs more than the calls. UsageError where `wait` would raise it.
        """
        check_may_wait("a read")
        reader, this_thread = self._by_channel.get(channel), _this_thread.state or _new_state()
        if reader is None or this_thread.reads is not None:
            return
        left, has_lock = iter(range(_READS_AT_ONCE)), False
        try:
            for has_lock in reader.lock_attempts:  # noqa: B007
                break  # one step
            if has_lock:  # one step
                this_thread.reads = reader  # one step, as in _maybe_read_for
                self._read_for(reader, lambda: next(left, None) is None, 0.0)
        finally:
            if has_lock:
                this_thread.reads = None
                reader.read_lock.release()  # one step
                if reader.is_wanted():
                    self.ensure_reader(reader)
                if reader not in self._watched or not self._is_watching:
                    self._watch(reader)

    def _wait_longer(
        self, reader: ChannelReader | None, held: ChannelReader | None, done: IsDone, block: Block
    ) -> None:
        """Wait after the short read, or inside a finalizer or signal handler."""
        if done():
            return
        check_may_wait("a wait")
        # If this thread was interrupted while sending, it holds a send lock, which others need.
        lent = release_send_locks()
        try:
            if held is not None and held is reader:
                self._read_inside(reader, done)
            elif held is not None:
                if reader is not None:
                    self.ensure_reader(reader)
                # Nobody else can read `held`, and the peer may need its frames to be read before it
                # answers. If reading `held` cannot be resumed, `reader` still delivers the answer.
                with suppress(UsageError):
                    held.owner._read_inside(held, done)
            if not done():
                block()
        finally:
            reacquire_send_locks(lent)

    def hand_over(self, _: object) -> None:
        """The calling watchdog thread is about to wait: replace it."""
        self._spawn_watchdog()
        self._wake_watchdog.put(None)

    def _read_inside(self, reader: ChannelReader, done: IsDone) -> None:
        """Read until `done`, with a read lock that the interrupted code of this thread holds.

        The interrupted code still handles the frame that it has taken. UsageError if it was
        interrupted at a point from which the read cannot be resumed.
        """
        # The interrupted code may have taken one frame that it has not counted yet. Each frame that
        # is handled here increases both counters. If their difference has changed, a frame was
        # taken here and not handled.
        outer = reader.channel.frames_received - reader.reads
        try:
            while not done():
                frame = reader.channel.maybe_recv(time.monotonic() + _LOOKS_INSIDE_SECONDS, done)
                if frame is not None:
                    self._on_frame(reader.worker, reader.channel, frame, False)
                    reader.reads += 1
        except Reentered:
            raise UsageError(
                "a finalizer or a signal handler waits for a peer while it interrupts its thread "
                f"in the middle of reading from {reader.channel.remote}",
                hint=MAKE_IT_ELSEWHERE,
            ) from None
        except (PeerLost, BadMessage) as error:
            reader.channel.close(str(error))
            # The interrupted code will find the same end, but only after this wait, which may need
            # to be told that the peer is lost.
            self._end(reader, error)
        except BaseException as error:
            if reader.channel.frames_received - reader.reads != outer:
                reader.channel.close(f"a message was taken and lost: {error!r}")
            raise

    def _maybe_read_for(
        self, reader: ChannelReader, this_thread: _ThreadState, done: IsDone
    ) -> bool:
        """Read until `done` or for a while, if no other thread reads; whether it is done."""
        has_lock = is_done = False
        try:
            for has_lock in reader.lock_attempts:  # noqa: B007
                break  # one step
            if not has_lock:  # one step
                return False
            # No interrupt can come before this store. Otherwise an inner wait would find the lock
            # taken, not know that its own thread holds it, and block.
            this_thread.reads = reader  # one step
            is_done = self._read_for(reader, done, time.monotonic() + _READS_FOR_ITSELF_SECONDS)
            return is_done
        finally:
            if has_lock:
                # Clear `reads` before the release; otherwise interrupting code would think that its
                # thread still holds the lock, and read beside the new holder.
                this_thread.reads = None
                reader.read_lock.release()  # one step
                # From here on perhaps nobody reads. An interrupt is harmless: it can take the lock.
                # If a thread still waits, a reader thread takes over now. If not, the next frame
                # may wait for a look of the watchdog.
                if not is_done or (len(reader.waiting) > 1 and reader.is_wanted()):
                    self.ensure_reader(reader)
                if reader not in self._watched or not self._is_watching:
                    self._watch(reader)

    def _read_for(self, reader: ChannelReader, done: IsDone, until: float) -> bool:
        """Read with the read lock held, on a thread that waits for `done`; whether it is done."""
        try:
            while not done():
                frame = reader.channel.maybe_recv(until, done)
                if frame is None:
                    return done()
                self._on_frame(reader.worker, reader.channel, frame, False)
                reader.reads += 1  # only now, so that has_lost_a_frame notices an exception above
            return True
        except Exception as error:  # about the channel, not this wait; a reader thread reports it
            _close_if_lost(reader, error)
        except BaseException:  # Ctrl-C in this thread; the frame may have been for another thread
            if reader.has_lost_a_frame():
                reader.channel.close("interrupted while a message was taken")
            raise
        return done()

    # -- reader threads

    def _read(self, reader: ChannelReader) -> None:
        try:
            self._read_on(reader)
        finally:
            reader.threads.pop()

    def _read_on(self, reader: ChannelReader) -> None:
        this_thread = _this_thread.state or _new_state()
        while not reader.has_ended:
            for has_lock in reader.lock_attempts:  # noqa: B007
                break  # one step
            if not has_lock:
                # Another thread reads. When it stops, it wakes a reader thread or tells the
                # watchdog, so this one may sleep.
                if not self._sleep(reader):
                    return
                continue
            this_thread.reads = reader  # in one step with the lock, as in _maybe_read_for
            reader.own_thread_reads = True
            try:
                frame = reader.channel.maybe_recv(math.inf)
                assert frame is not None, "maybe_recv without a deadline returned None"
                reader.reads += 1  # before it is handled: any error closes the channel anyway
                job = self._on_frame(reader.worker, reader.channel, frame, True)
            except (PeerLost, BadMessage) as error:
                reader.channel.close(str(error))
                self._end(reader, error)
                return  # keep the lock, so that no thread reads the ended channel
            except Exception as error:  # a bug; still no channel may be left without a reader
                reader.channel.close(str(error))
                _log.exception("reading from %s failed", reader.channel.remote)
                self._end(reader, PeerLost(f"reading failed: {error!r}"))
                return
            # First the flag, for the watchdog: see `_check`. Then `reads` before the release, as in
            # _maybe_read_for.
            reader.own_thread_reads = False
            this_thread.reads = None
            reader.read_lock.release()
            if job is not None:
                self._run(reader, this_thread, job)
            elif (frame.flags & IS_ANSWER or reader.waiting) and not reader.is_wanted():
                # The thread that waited for this answer goes on, and will read for itself when it
                # waits again. The watchdog is told before this thread sleeps, so the channel always
                # has a reader or the watchdog.
                self._watch(reader)
                if not self._sleep(reader):
                    return

    def _run(self, reader: ChannelReader, this_thread: _ThreadState, job: Job) -> None:
        # An interrupt between these two lines finds neither `reads` nor `runs`. Then `hand_over`
        # counts this thread as busy twice, and starts one reader thread more than needed.
        reader.running.append(None)
        this_thread.runs = True
        if reader not in self._watched or not self._is_watching:
            self._watch(reader)
        try:
            job()
        except BaseException:  # a bug, as the job answers what its handler raises; read on
            _log.exception("a job for %s failed", reader.channel.remote)
        finally:
            this_thread.runs = False
            reader.running.pop()

    def _sleep(self, reader: ChannelReader) -> bool:
        """Sleep until the channel needs a reader; False if another reader thread sleeps already."""
        if reader.idle:
            return False
        wake: SimpleQueue[None] = SimpleQueue()
        # Set `wake` first: once the queue is in the list, another thread may rely on it, so from
        # then on interrupting code must know which queue to remove.
        this_thread = _this_thread.state or _new_state()
        this_thread.wake = wake
        reader.idle.append(wake)
        # This thread checks the flag after the append, and `_mark_ended` sets it before it empties
        # the list. So either this thread sees the flag, or `_mark_ended` sees the queue.
        if reader.has_ended:
            self._mark_ended(reader)
        wake.get()
        # If the queue is still in the list, nobody has woken this thread to read: it was
        # interrupted before the append, and `_resume` has put an item into the queue.
        if wake in reader.idle:
            with suppress(ValueError):  # it may be removed by a waker between these two lines
                reader.idle.remove(wake)
        this_thread.wake = None
        return True

    def _maybe_wake(self, reader: ChannelReader) -> bool:
        """Wake one of its idle threads; False if none is idle."""
        try:
            wake = reader.idle.pop()  # one call into C: no two threads get the same queue
        except IndexError:
            return False
        wake.put(None)
        return True

    def ensure_reader(self, reader: ChannelReader) -> None:
        """Wake an idle reader thread, or start another one if all of them run jobs."""
        if self._maybe_wake(reader) or reader.has_ended or self._closed:
            return
        if len(reader.running) < len(reader.threads):
            return  # one of them runs no job: it will read, or has told the watchdog and sleeps
        reader.threads.append(None)  # two threads may each start one; the surplus sleeps or ends
        try:
            self._spawn("read on", lambda: self._read(reader), reader)
        except BaseException:
            reader.threads.pop()
            raise

    def _end(self, reader: ChannelReader, error: GradwireError) -> None:
        self._mark_ended(reader)
        # Code that interrupts a reader thread may find the end before that thread does. The one
        # that removes the entry reports it.
        is_first = self._by_channel.pop(reader.channel, None) is not None
        self._watched.pop(reader, None)
        if is_first:
            self._on_end(reader, error)

    # -- the watchdog

    def _watch(self, reader: ChannelReader) -> None:
        """Let the watchdog look at this channel, which perhaps nobody reads."""
        self._watched[reader] = None  # before the flag is read: see `_run_watchdog`
        if not self._is_watching:
            self._wake_watchdog.put(None)

    def _spawn_watchdog(self) -> None:
        self._watchdog = token = object()
        self._spawn("watchdog", lambda: self._run_watchdog(token), self)

    def _run_watchdog(self, token: object) -> None:
        while token is self._watchdog and not self._closed:
            self._wake_watchdog.get()
            self._is_watching = True
            tick = _TICK_SECONDS
            while self._watched and token is self._watchdog and not self._closed:
                time.sleep(tick)
                is_quiet = self._check_all()
                tick = _TICK_SECONDS if is_quiet else min(2 * tick, _LONGEST_TICK_SECONDS)
            # A reader that is added while the flag is up does not wake the watchdog. So the flag
            # goes down first, and then the watchdog looks once more.
            self._is_watching = False
            if self._watched:
                self._wake_watchdog.put(None)

    def _check_all(self) -> bool:
        """Check all watched channels; whether one of them is neither busy nor read by a thread."""
        is_quiet = False
        for reader in tuple(self._watched):
            try:
                is_quiet |= self._check(reader)
            except Exception:  # e.g. no thread left; all channels need the watchdog to go on
                _log.exception("the watchdog failed to check a channel")
                is_quiet = True
        return is_quiet

    def _check(self, reader: ChannelReader) -> bool:
        """Handle what has come and ensure a reader; True unless it has ended, is busy or is read.

        A channel is watched until one of its reader threads holds the read lock.
        """
        if reader.has_ended:
            self._watched.pop(reader, None)
            return False
        fresh, reader.seen = reader.reads - reader.seen, reader.reads
        if fresh:
            reader.idle_ticks = 0
        if fresh >= _READS_OF_BUSY_CHANNEL:
            return False
        if reader.own_thread_reads:
            # A reader thread that stops reading clears the flag, then adds its channel unless it is
            # watched. If it saw the channel watched just before this `pop`, it added nothing; but
            # the flag is clear by now, so check it again.
            self._watched.pop(reader, None)
            if not reader.own_thread_reads:
                self._watched[reader] = None
            return False
        came = self._poll(reader)
        reader.seen = reader.reads
        reader.idle_ticks += 1
        if came or reader.idle_ticks >= _TICKS_UNTIL_IDLE:
            self.ensure_reader(reader)
        return True

    def _poll(self, reader: ChannelReader) -> bool:
        """Handle one frame that came while nobody read; whether there was one, or the end."""
        this_thread = _this_thread.state or _new_state()
        for has_lock in reader.lock_attempts:  # noqa: B007
            break  # one step
        if not has_lock:
            return False
        this_thread.reads = reader  # in one step with the lock, as in _maybe_read_for
        try:
            frame = reader.channel.maybe_recv(0.0)
            if frame is None:
                return False
            self._on_frame(reader.worker, reader.channel, frame, False)
            reader.reads += 1  # as in _read_for
        except Exception as error:  # the channel is closed: a reader thread reports its end
            _close_if_lost(reader, error)
            return True
        finally:
            this_thread.reads = None
            reader.read_lock.release()
        return True


def refuse_to_wait(*_: object) -> NoReturn:
    """Refuse: in a forked process no thread would read the answer."""
    hint = "start processes by spawn, or wait in the worker and hand over the value"
    raise UsageError(FORKED, hint=hint)


def _close_if_lost(reader: ChannelReader, error: Exception) -> None:
    """Reading failed outside of a reader thread: close the channel if a frame was lost by that.

    The traceback of a bug is kept: the reader thread that finds the closed channel has none.
    """
    if reader.has_lost_a_frame():
        reader.channel.close(str(error))
    if not isinstance(error, GradwireError):
        _log.error("handling a message from %s failed", reader.channel.remote, exc_info=error)
