"""Which thread reads a channel: few wake-ups, and no frame is left unread."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from queue import SimpleQueue

import pytest

from gradwire import threads
from gradwire.agent.links import readers as readers_module
from gradwire.agent.links.readers import ChannelReader, ChannelReaders
from gradwire.errors import PeerLost
from gradwire.transport.memory import MemoryNetwork
from gradwire.transport.unix import UnixTransport
from gradwire.wire.message import IS_ANSWER, Frame
from tests.leftovers import eventually


class Desk:
    """One end with its readers; the test is the other end."""

    def __init__(self) -> None:
        self.here, self.there = MemoryNetwork().pair()
        self.came: list[tuple[int, str]] = []
        self.ended: list[str] = []
        self.jobs: dict[int, object] = {}
        self.threads: list[threading.Thread] = []
        self.readers = ChannelReaders(self._spawn, self._take, self._end)

    def open(self) -> None:
        self.readers.open(1, self.here, "peer")

    def _spawn(self, what, target, duty=None) -> None:
        thread = threads.thread(what, target, duty)
        self.threads.append(thread)
        thread.start()

    def _take(self, worker, channel, frame, may_run):
        self.came.append((frame.request, threading.current_thread().name))
        if frame.request in self.jobs and may_run:
            return self.jobs[frame.request]
        return None

    def _end(self, reader, error) -> None:
        self.ended.append(str(error))

    def send(self, n: int, flags: int = 0) -> None:
        self.there.send(Frame(1, flags, n, b"", ()), time.monotonic() + 10)

    def has(self, n: int) -> bool:
        return any(request == n for request, _ in self.came)

    def reader_of(self, n: int) -> str:
        return next(thread for request, thread in self.came if request == n)

    def wait(self, n: int) -> None:
        self.readers.wait(self.here, lambda: self.has(n), lambda: eventually(lambda: self.has(n)))


@pytest.fixture
def desk():
    made = Desk()
    made.open()
    yield made
    made.here.close()
    made.readers.close()
    for thread in made.threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in made.threads)


def test_what_comes_is_read_by_its_reader(desk):
    desk.send(1)
    assert eventually(lambda: desk.has(1))
    assert desk.reader_of(1) == "read peer"


def after_an_answer(desk):
    """The reader has read an answer that nobody waits for any more, and lets others read."""

    def is_idle():
        return any(reader.idle for reader in desk.readers._by_channel.values())

    def sent_until_idle():  # the watchdog wakes it again soon, so one look may come too late
        desk.send(0, IS_ANSWER)
        return eventually(is_idle, seconds=0.1)

    assert eventually(sent_until_idle)


def test_after_an_answer_the_thread_that_waits_reads(desk):
    me = threading.current_thread().name
    for n in range(1, 50):
        after_an_answer(desk)
        desk.send(n, IS_ANSWER)
        desk.wait(n)
    readers = [desk.reader_of(n) for n in range(1, 50)]
    assert readers.count(me) > 25  # the watchdog may have been first now and then


def test_what_nobody_waits_for_is_found_by_the_watchdog(desk):
    after_an_answer(desk)
    desk.send(1)
    assert eventually(lambda: desk.has(1))


def test_the_channel_goes_on_being_read_while_a_job_runs_on_its_reader(desk):
    began, goes_on = threading.Event(), threading.Event()

    def job():
        began.set()
        assert goes_on.wait(20)

    desk.jobs[1] = job
    desk.send(1)
    assert began.wait(20)
    for n in range(2, 6):
        desk.send(n)
    assert eventually(lambda: all(desk.has(n) for n in range(2, 6)))
    goes_on.set()


def test_a_job_that_waits_does_not_leave_its_own_channel_unread(desk):
    other = Desk()
    other.readers = desk.readers
    desk.readers.open(2, other.here, "other")
    after_an_answer(desk)

    def job():
        desk.readers.wait(other.here, lambda: desk.has(7), lambda: eventually(lambda: desk.has(7)))

    desk.jobs[1] = job
    desk.send(1)
    desk.send(2)
    assert eventually(lambda: desk.has(2))
    other.send(7)
    assert eventually(lambda: desk.has(7))
    other.here.close()


def test_one_who_has_its_answer_leaves_a_reader_to_the_others(desk):
    after_an_answer(desk)
    done = []
    waiting = threading.Thread(target=lambda: (desk.wait(2), done.append(2)))
    first = threading.Thread(target=lambda: (desk.wait(1), done.append(1)))
    first.start()
    waiting.start()
    desk.send(1, IS_ANSWER)
    first.join(20)
    desk.send(2, IS_ANSWER)
    waiting.join(20)
    assert sorted(done) == [1, 2]


@pytest.mark.parametrize("parked", [False, True], ids=["reading", "nobody reads"])
def test_the_end_of_a_channel_is_told_once(desk, parked):
    if parked:
        after_an_answer(desk)
    desk.there.close("enough")
    assert eventually(lambda: desk.ended)
    assert len(desk.ended) == 1


def test_a_frame_that_cannot_be_handled_ends_the_channel_and_is_logged(desk, caplog):
    after_an_answer(desk)

    def refuse(*_):
        raise ValueError("what is this?")

    desk.readers._on_frame = refuse
    desk.send(1)
    assert eventually(lambda: desk.ended)
    assert any(record.exc_info and record.exc_info[0] is ValueError for record in caplog.records)


def test_a_channel_is_watched_until_a_thread_of_its_own_reads_it():
    here, _ = MemoryNetwork().pair()
    spawned = []
    readers = ChannelReaders(
        lambda what, *_: spawned.append(what), lambda *_: None, lambda *_: None
    )
    readers.open(1, here, "peer")  # its reader is about to read, but does not get there yet
    (reader,) = readers._by_channel.values()
    readers._watch(reader)

    for _ in range(20):
        readers._check(reader)
    assert reader in readers._watched
    assert spawned == ["watchdog", "read peer"]

    reader.own_thread_reads = True
    readers._check(reader)
    assert reader not in readers._watched


def test_a_channel_whose_thread_stops_reading_during_a_look_stays_watched():
    class GoesOn(ChannelReader):
        """A reader thread holds the lock at the first look, and not at the second."""

        looks = 0

        @property
        def own_thread_reads(self):
            self.looks += 1
            return self.looks == 1

        @own_thread_reads.setter
        def own_thread_reads(self, value):
            pass

    readers = ChannelReaders(lambda *_: None, lambda *_: None, lambda *_: None)
    reader = GoesOn(1, MemoryNetwork().pair()[0], readers)
    readers._watched[reader] = None
    readers._check(reader)
    assert reader in readers._watched


def test_a_reader_more_is_made_only_if_all_are_busy(desk):
    began, goes_on = threading.Event(), threading.Event()

    def job():
        began.set()
        assert goes_on.wait(20)

    (reader,) = desk.readers._by_channel.values()
    desk.jobs[1] = job
    desk.send(1)
    assert began.wait(20)
    assert eventually(lambda: reader.own_thread_reads)
    for _ in range(5):
        desk.readers.ensure_reader(reader)
    assert (len(reader.threads), len(reader.running)) == (2, 1)
    goes_on.set()
    assert eventually(lambda: not reader.running)


def test_an_idle_channel_has_its_reader_back_and_the_watchdog_sleeps(desk):
    after_an_answer(desk)
    assert eventually(lambda: not desk.readers._watched and not desk.readers._is_watching)
    (reader,) = desk.readers._by_channel.values()
    assert eventually(lambda: reader.read_lock.locked())


# -- interrupts


def interrupt(*_):
    raise KeyboardInterrupt


class InterruptedOnce:
    """A lock; a Ctrl-C comes just when it has been released for the first time."""

    def __init__(self, inner) -> None:
        self._inner, self._had_it = inner, False

    def __enter__(self):
        self._inner.acquire()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def __exit__(self, *_):
        self.release()

    def release(self):
        self._inner.release()
        if not self._had_it:
            self._had_it = True
            interrupt()


def socket_ends():
    """Two ends of a connection, and where an interrupt comes to who has just taken a frame."""
    with closing(UnixTransport().listen("unix://")) as listener:
        here = UnixTransport().connect(listener.address, time.monotonic() + 10)
        there = listener.accept()
    return here, there, (here, "_receiving")


def memory_ends():
    here, there = MemoryNetwork().pair()
    here._incoming._room.acquire()  # as one that waits for room does: who makes room releases it
    return here, there, (here._incoming, "_room")


def read_by_this_thread(desk):
    """The reader, with its read lock held by this thread."""
    (reader,) = desk.readers._by_channel.values()
    after_an_answer(desk)
    while not reader.read_lock.acquire(blocking=False):
        after_an_answer(desk)
    return reader


def read_for(desk, reader, done):
    """Read with its read lock, and release that as `wait` does."""
    try:
        desk.readers._read_for(reader, done, time.monotonic() + 30)
    finally:
        reader.read_lock.release()
        desk.readers.ensure_reader(reader)


def test_an_interrupt_while_a_frame_is_handled_ends_the_channel_rather_than_lose_it(desk):
    reader = read_by_this_thread(desk)
    desk.readers._on_frame = interrupt
    desk.send(1)
    with pytest.raises(KeyboardInterrupt):
        read_for(desk, reader, lambda: False)
    assert eventually(lambda: desk.ended)


@pytest.mark.parametrize("size", [0, 1 << 16], ids=["read ahead", "read in parts"])
@pytest.mark.parametrize("ends", [socket_ends, memory_ends])
def test_an_interrupt_before_a_taken_frame_has_a_name_ends_the_channel(ends, size):
    here, there, (holder, lock) = ends()
    readers = ChannelReaders(lambda *_: None, lambda *_: None, lambda *_: None)
    readers.open(1, here, "peer")  # its reader does not get to read
    there.send(Frame(1, 0, 1, bytes(size), ()), time.monotonic() + 10)
    setattr(holder, lock, InterruptedOnce(getattr(holder, lock)))
    with pytest.raises(KeyboardInterrupt):
        readers.wait(here, lambda: False, lambda: None)
    with pytest.raises(PeerLost, match="interrupted while a message was taken"):
        here.maybe_recv(0.0)
    there.close()


def test_an_interrupt_while_nothing_comes_leaves_the_channel_in_order(desk):
    reader = read_by_this_thread(desk)
    with pytest.raises(KeyboardInterrupt):
        read_for(desk, reader, interrupt)
    desk.send(1)
    assert eventually(lambda: desk.has(1))
    assert not desk.ended


def interrupted_reader(desk, monkeypatch, where):
    """A finalizer runs on the reader where it is about to sleep or has just been woken, and waits
    for what comes on the same channel."""
    (reader,) = desk.readers._by_channel.values()
    waited = threading.Event()

    class WakeQueue(SimpleQueue):
        """Interrupted once."""

        def get(self):
            if where == "before" and not waited.is_set():
                self._interrupt()
            super().get()
            if where == "after" and not waited.is_set():
                self._interrupt()

        def _interrupt(self):
            waited.set()
            desk.send(7)
            desk.readers.wait(
                desk.here, lambda: desk.has(8), lambda: eventually(lambda: desk.has(8))
            )

    monkeypatch.setattr(readers_module, "SimpleQueue", WakeQueue)
    return reader, waited


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_reader_that_is_interrupted_as_it_sleeps_is_replaced(desk, monkeypatch, where):
    reader, waited = interrupted_reader(desk, monkeypatch, where)
    desk.send(0, IS_ANSWER)  # then its reader sleeps

    def is_interrupted():
        desk.readers.ensure_reader(reader)
        return waited.is_set()

    assert eventually(is_interrupted)
    desk.send(8)
    assert eventually(lambda: desk.has(8))
    desk.send(9)
    assert eventually(lambda: desk.has(9))


def test_a_watchdog_that_is_interrupted_is_replaced(desk, monkeypatch):
    readers, first = desk.readers, desk.readers._watchdog
    check = readers._check
    waited = threading.Event()

    def interrupted(reader):
        if not waited.is_set():
            waited.set()
            readers.wait(desk.here, lambda: desk.has(8), lambda: eventually(lambda: desk.has(8)))
        return check(reader)

    monkeypatch.setattr(readers, "_check", interrupted)
    after_an_answer(desk)
    assert waited.wait(10)
    assert eventually(lambda: readers._watchdog is not first)
    desk.send(8)
    assert eventually(lambda: desk.has(8))
    assert eventually(lambda: sum(t.is_alive() and t.name == "watchdog" for t in desk.threads) == 1)


def test_a_watchdog_notes_what_it_reads_without_an_allocation(desk):
    """Else the collector might run a finalizer between taking the read lock and the note."""
    noted = []

    class Attempts:
        def __iter__(self):
            return self

        def __next__(self):
            noted.append(readers_module._this_thread.state is not None)
            return False

    (reader,) = desk.readers._by_channel.values()
    reader.lock_attempts = Attempts()
    started = threading.Thread(target=desk.readers._poll, args=(reader,))
    started.start()
    started.join()

    assert noted[-1]
