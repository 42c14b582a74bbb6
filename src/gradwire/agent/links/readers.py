"""Who reads a channel: a reader of its own, or whoever waits for what comes by it.

Waking a thread costs more than all the rest of a small call. So hand-overs are avoided:

    a thread that waits for an answer reads the channel itself, if nobody else does, for a while
    a reader that gets a request which is known to be short runs it itself

The right to read a line is its *role*. While a function runs on the thread that read it, or between
two calls, the role is free: nobody reads. The watchdog sees to that. It looks every 2 ms at the
lines that were in use lately, takes what has come, and gives the line a reader. A line on which
much was read since is left alone, and as long as that is so of all, it looks less and less often: a
look takes the interpreter from whoever makes the calls. So what nobody waits for is read at the
second look, mostly after 2 ms and at most after 16, however long a function runs. A line that is
quiet for two looks has a reader that sleeps, and when all have one the watchdog sleeps too.

A signal handler or a finalizer may run while its own thread has a role, and wait for something.
Nobody else could read that line meanwhile, so the inner wait reads it on, whatever it waits for
(see Note [Reading inside a read] in transport/sockets/reader.py). A thread never has two roles.

It may also run in the middle of what is here. So nothing here is locked but the role: lists change
in single steps of the interpreter, and who sleeps is woken by a SimpleQueue, whose `put` may be
interrupted by itself (that of `threading.Event` may not). And a thread that has something to do
here, a reader or the watchdog, is not counted on while code that interrupts it waits: it hands
over.

The role is taken by `for has_role in line.taking: break`, which takes it and notes it in one step
for the interpreter (see `taking`): a role that is held is always given back.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import final

from gradwire import threads
from gradwire.agent.serving.thread_pool import Job
from gradwire.errors import BadMessage, GradwireError, PeerLost, UsageError
from gradwire.ids import WorkerId
from gradwire.threads import MAKE_IT_ELSEWHERE, check_may_wait, taking
from gradwire.transport.base import Channel, Reentered
from gradwire.wire.frame import IS_ANSWER, Frame

_log = logging.getLogger("gradwire")

_TICK_SECONDS = 0.002
_LONGEST_TICK_SECONDS = 0.008
_TICKS_UNTIL_IDLE = 2
_READS_OF_BUSY_LINE = 8
"""From one look to the next."""
_LOOKS_INSIDE_SECONDS = 1.0
_READS_FOR_ITSELF_SECONDS = 0.02
"""Then whoever waits sleeps, so that it can be woken by something else than what it reads."""

Done = Callable[[], bool]
OnFrame = Callable[[WorkerId, Channel, Frame, bool], Job | None]
"""Takes a frame; what it asks for, if the thread that read it may and should run that itself."""
OnEnd = Callable[["ChannelReader", GradwireError], None]


@final
class ChannelReader:
    """One channel, and who reads it."""

    may_wait = True

    def __init__(self, worker: WorkerId, channel: Channel, lines: ChannelReaders) -> None:
        self.worker, self.channel, self.lines = worker, channel, lines
        self.role = threading.Lock()
        self.taking: Iterator[bool] = taking(self.role)
        self.waiting: list[Done] = []
        """what threads wait for that comes by this line"""
        self.reads = self.seen = channel.taken
        self.idle_ticks = 0
        self.readers: list[None] = []
        """one for each thread that reads it when it can"""
        self.running: list[Job] = []
        """what they run that they have read"""
        self.parked: list[SimpleQueue[None]] = []
        """what wakes each of them that sleeps, mostly one; whoever takes it out wakes it"""
        self.has_ended = False
        self.is_attended = False
        """whether one of its readers has the role: it will see what comes"""

    def is_wanted(self) -> bool:
        """Whether somebody still waits for something."""
        return any(not done() for done in tuple(self.waiting))

    def has_lost_a_frame(self) -> bool:
        """Whether one was taken and not handled; for who has the role, when it was disturbed.

        The channel counts: an interrupt may come before what it returns has a name here.
        """
        return self.channel.taken != self.reads

    def hand_over(self, line: object) -> threads.Undo | None:
        """One of its readers waits for what comes by `line`: another one is to read here.

        A reader that was interrupted between two frames, or as it goes to sleep, is neither
        asleep nor about to read, so it counts as one that runs something.
        """
        if _mine.reads is not None:
            return None
        if _mine.runs:
            if self is not line:
                self.lines.attend(self)
            return None
        bed = _mine.bed
        if bed is not None:
            with suppress(ValueError):  # it was called: nobody else is
                self.parked.remove(bed)
        self.running.append(_nothing)
        self.lines.attend(self)
        return partial(self._is_back, bed)

    def _is_back(self, bed: SimpleQueue[None] | None) -> None:
        self.running.pop()
        if bed is not None:
            bed.put(None)


class _Mine(threading.local):
    """What each thread knows of itself, for all workers of the process.

    A finalizer may be any worker's: it may call as one worker on a thread that reads for another.
    """

    runs: bool = False
    """whether it runs a frame that it has read, as a reader"""
    reads: ChannelReader | None = None
    """whose role it has"""
    bed: SimpleQueue[None] | None = None
    """what wakes it, from before it sleeps until it is awake"""


_mine = _Mine()
_of_process: dict[ChannelReaders, None] = {}
"""those of all workers of the process that are open; hot: asked by each wait that lasts"""


@final
class ChannelReaders:
    """The lines of one worker."""

    may_wait = True

    def __init__(self, spawn: threads.Spawn, on_frame: OnFrame, on_end: OnEnd) -> None:
        self._spawn, self._on_frame, self._on_end = spawn, on_frame, on_end
        self._lines: dict[Channel, ChannelReader] = {}
        self._in_use: dict[ChannelReader, None] = {}  # in order: a set has none
        self._look: SimpleQueue[None] = SimpleQueue()
        self._keeper = object()
        """the one that is counted on; one that was interrupted is not, and ends"""
        self._is_looking = self._closed = False

    def open(self, worker: WorkerId, channel: Channel, name: str) -> None:
        """Read this channel from now on."""
        if not self._closed:  # here, so that a worker which never opened one leaves nothing behind
            if self not in _of_process:
                self._spawn_keeper()
            _of_process[self] = None
        with threads.no_collection():  # a finalizer here would wait, and nobody read this channel
            line = self._lines[channel] = ChannelReader(worker, channel, self)
            line.readers.append(None)
            self._spawn(f"read {name}", lambda: self._read(line, name), line)

    def all(self) -> list[ChannelReader]:
        """Every one that is open."""
        return list(self._lines.values())

    def close(self) -> None:
        """Their channels are closed: let every thread see it."""
        self._closed = True
        _of_process.pop(self, None)
        for line in tuple(self._lines.values()):
            self._wake_all(line)
        self._look.put(None)

    def _wake_all(self, line: ChannelReader) -> None:
        line.has_ended = True
        while self._maybe_wake(line):
            pass

    def forked(self) -> None:
        """In a forked process nobody reads."""
        self._closed = True
        _of_process.pop(self, None)

    def wait(self, channel: Channel | None, done: Done, block: Callable[[], object]) -> None:
        """Until `done`: read the channel for a while if nobody does, else `block`."""
        line = self._lines.get(channel) if channel is not None else None
        held, duty = _mine.reads, threads.mine.duty
        undo = duty.hand_over(line) if duty is not None else None
        if line is not None:
            line.waiting.append(done)
        try:
            if held is None and line is not None:
                self._maybe_read_for(line, done)
            if not done():
                self._wait_longer(line, held, done, block)
        finally:
            if line is not None:
                line.waiting.remove(done)
            if undo is not None:
                undo()

    def _wait_longer(
        self,
        line: ChannelReader | None,
        held: ChannelReader | None,
        done: Done,
        block: Callable[[], object],
    ) -> None:
        """What this thread interrupts may be sending: meanwhile others must be able to."""
        check_may_wait("a wait")
        every = [channel for lines in tuple(_of_process) for channel in tuple(lines._lines)]
        lent = [channel for channel in every if channel.lend_turn()]
        try:
            if held is not None and held is line:
                self._read_inside(line, done)
            elif held is not None:
                if line is not None:
                    self.attend(line)
                with suppress(UsageError):  # what is waited for comes by another line
                    held.lines._read_inside(held, done)
            if not done():
                block()
        finally:
            for channel in lent:
                channel.take_turn_back()

    def hand_over(self, line: object) -> None:
        """The watchdog waits: another one keeps from now on."""
        self._spawn_keeper()
        self._look.put(None)

    def _read_inside(self, line: ChannelReader, done: Done) -> None:
        """Until `done`, on a line whose role this thread has: what it interrupts had taken it.

        The frame that the interrupted code is handling, if any, stays with it. UsageError if what
        it interrupts cannot be gone on with.
        """
        outer = line.channel.taken - line.reads
        try:
            while not done():
                frame = line.channel.maybe_recv(time.monotonic() + _LOOKS_INSIDE_SECONDS, done)
                if frame is not None:
                    self._on_frame(line.worker, line.channel, frame, False)
                    line.reads += 1
        except Reentered:
            raise UsageError(
                "a finalizer or a signal handler waits for a peer while it interrupts its thread "
                f"in the middle of reading from {line.channel.remote}",
                hint=MAKE_IT_ELSEWHERE,
            ) from None
        except (PeerLost, BadMessage) as error:
            line.channel.close(str(error))
            self._end(line, error)  # whoever it interrupts finds the same, too late for this wait
        except BaseException as error:
            if line.channel.taken - line.reads != outer:
                line.channel.close(f"a message was taken and lost: {error!r}")
            raise

    def _maybe_read_for(self, line: ChannelReader, done: Done) -> None:
        """If nobody else reads, until `done` or for a while."""
        mine, has_role = _mine, False
        try:
            for has_role in line.taking:  # noqa: B007
                break  # one step
            if not has_role:  # one step
                return
            mine.reads = line  # one step
            self._read_for(line, done)
        finally:
            if has_role:
                mine.reads = None
                line.role.release()  # one step
                if not done() or (len(line.waiting) > 1 and line.is_wanted()):
                    self.attend(line)
                if line not in self._in_use or not self._is_looking:
                    self._keep(line)

    def _read_for(self, line: ChannelReader, done: Done) -> None:
        """With the role held."""
        until = time.monotonic() + _READS_FOR_ITSELF_SECONDS
        try:
            while not done():
                frame = line.channel.maybe_recv(until, done)
                if frame is None:
                    break
                self._on_frame(line.worker, line.channel, frame, False)
                line.reads += 1  # at last: what was taken and is not counted here is lost
        except Exception as error:
            if line.has_lost_a_frame():  # as in _handle
                line.channel.close(str(error))
            _log.debug("its reader finds the same, and says so", exc_info=True)
        except BaseException:  # an interrupt of our thread: the frame may have been another's
            if line.has_lost_a_frame():
                line.channel.close("interrupted while a message was taken")
            raise

    def _handle(self, line: ChannelReader, frame: Frame, *, may_run: bool) -> Job | None:
        line.reads += 1
        try:
            return self._on_frame(line.worker, line.channel, frame, may_run)
        except Exception as error:  # whoever reads next finds the end
            line.channel.close(str(error))
            raise

    # -- readers

    def _read(self, line: ChannelReader, name: str) -> None:
        try:
            self._read_on(line, name)
        finally:
            line.readers.pop()

    def _read_on(self, line: ChannelReader, name: str) -> None:
        mine = _mine
        mine.reads = None  # the first use in a thread makes a place for it, which is not one step
        while not line.has_ended:
            for has_role in line.taking:  # noqa: B007
                break  # one step
            if not has_role:
                if not self._park(line):
                    return
                continue
            mine.reads = line
            line.is_attended = True
            try:
                frame = line.channel.maybe_recv(math.inf)
                assert frame is not None, "without a limit it waits until one comes"
                job = self._handle(line, frame, may_run=True)
            except (PeerLost, BadMessage) as error:
                self._end(line, error)
                return
            except Exception as error:  # a mistake of ours: no channel may be left without a reader
                _log.exception("reading from %s failed", name)
                self._end(line, PeerLost(f"reading failed: {error!r}"))
                return
            line.is_attended = False
            mine.reads = None
            line.role.release()
            if job is not None:
                self._run(line, job)
            elif (frame.flags & IS_ANSWER or line.waiting) and not line.is_wanted():
                # Whoever waited goes on, and will read for itself when it waits again.
                self._keep(line)
                if not self._park(line):
                    return

    def _run(self, line: ChannelReader, job: Job) -> None:
        line.running.append(job)
        _mine.runs = True
        if line not in self._in_use or not self._is_looking:
            self._keep(line)
        try:
            job()
        finally:
            _mine.runs = False
            line.running.pop()

    def _park(self, line: ChannelReader) -> bool:
        """Sleep until the line needs a reader; False if another one is asleep already."""
        if line.parked:
            return False
        bed: SimpleQueue[None] = SimpleQueue()
        _mine.bed = bed
        line.parked.append(bed)
        if line.has_ended:  # after it is there: of the two, who ends the line sees the other
            self._wake_all(line)
        bed.get()
        if bed in line.parked:  # it was interrupted, and is awake for that reason alone
            with suppress(ValueError):
                line.parked.remove(bed)
        _mine.bed = None
        return True

    def _maybe_wake(self, line: ChannelReader) -> bool:
        """Whether one of its readers slept."""
        try:
            bed = line.parked.pop()
        except IndexError:
            return False
        bed.put(None)
        return True

    def attend(self, line: ChannelReader) -> None:
        """Let one of its readers read, or one more if all of them are busy."""
        if self._maybe_wake(line) or line.has_ended or self._closed:
            return
        if len(line.running) < len(line.readers):
            return  # one of them is just about to
        line.readers.append(None)  # two at once may both add one: the second sleeps, or ends
        try:
            self._spawn("read on", lambda: self._read(line, "a peer"), line)
        except BaseException:
            line.readers.pop()
            raise

    def _end(self, line: ChannelReader, error: GradwireError) -> None:
        self._wake_all(line)
        is_first = self._lines.pop(line.channel, None) is not None
        self._in_use.pop(line, None)
        if is_first:  # code that interrupts a reader may find the end before it does
            self._on_end(line, error)

    # -- the watchdog

    def _keep(self, line: ChannelReader) -> None:
        """Nobody may be reading this line: look after it."""
        self._in_use[line] = None
        if not self._is_looking:
            self._look.put(None)

    def _spawn_keeper(self) -> None:
        self._keeper = keeper = object()
        self._spawn("keep", lambda: self._keep_looking(keeper), self)

    def _keep_looking(self, keeper: object) -> None:
        while keeper is self._keeper and not self._closed:
            self._look.get()
            self._is_looking = True
            self._look_on(keeper)
            self._is_looking = False
            if self._in_use:  # added just now
                self._look.put(None)

    def _look_on(self, keeper: object) -> None:
        tick = _TICK_SECONDS
        while self._in_use and keeper is self._keeper and not self._closed:
            time.sleep(tick)
            is_quiet = self._look_at_all()
            tick = _TICK_SECONDS if is_quiet else min(2 * tick, _LONGEST_TICK_SECONDS)

    def _look_at_all(self) -> bool:
        """Whether there is a line on which nobody has read since the last look."""
        is_quiet = False
        for line in tuple(self._in_use):
            try:
                is_quiet |= self._look_at(line)
            except Exception:  # such as no thread to be had: every line depends on this one
                _log.exception("looking after a channel failed")
                is_quiet = True
        return is_quiet

    def _look_at(self, line: ChannelReader) -> bool:
        """It is looked after until one of its readers has the role, which is tried each time."""
        if line.has_ended:
            self._in_use.pop(line, None)
            return False
        fresh, line.seen = line.reads - line.seen, line.reads
        if fresh:
            line.idle_ticks = 0
        if fresh >= _READS_OF_BUSY_LINE:
            return False
        if line.is_attended:
            self._in_use.pop(line, None)
            if not line.is_attended:  # its reader has just gone on to run something
                self._in_use[line] = None
            return False
        came = self._take(line)
        line.seen = line.reads
        line.idle_ticks += 1
        if came or line.idle_ticks >= _TICKS_UNTIL_IDLE:
            self.attend(line)
        return True

    def _take(self, line: ChannelReader) -> bool:
        """What has come while nobody read."""
        mine = _mine
        for has_role in line.taking:  # noqa: B007
            break  # one step
        if not has_role:
            return False
        mine.reads = line
        try:
            frame = line.channel.maybe_recv(0.0)
            if frame is None:
                return False
            self._handle(line, frame, may_run=False)
        except Exception:
            return True  # its reader finds the same, and says so
        finally:
            mine.reads = None
            line.role.release()
        return True


def _nothing() -> None:
    """What a reader runs that was interrupted between two frames."""
