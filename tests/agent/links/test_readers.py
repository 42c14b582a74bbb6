"""Who reads a channel: nobody is woken who need not be, and nothing that comes is left lying."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from queue import SimpleQueue

import pytest

from gradwire import threads
from gradwire.agent.links import readers as lines_module
from gradwire.agent.links.readers import ChannelReader, ChannelReaders
from gradwire.errors import PeerLost
from gradwire.transport.memory import MemoryNetwork
from gradwire.transport.unix import UnixTransport
from gradwire.wire.frame import IS_ANSWER, Frame
from tests.leftovers import eventually


class Desk:
    """One end with its lines; the test is the other end."""

    def __init__(self) -> None:
        self.here, self.there = MemoryNetwork().pair()
        self.came: list[tuple[int, str]] = []
        self.ended: list[str] = []
        self.jobs: dict[int, object] = {}
        self.threads: list[threading.Thread] = []
        self.lines = ChannelReaders(self._spawn, self._take, self._end)

    def open(self) -> None:
        self.lines.open(1, self.here, "peer")

    def _spawn(self, what, target, duty=None) -> None:
        thread = threads.thread(what, target, duty)
        self.threads.append(thread)
        thread.start()

    def _take(self, worker, channel, frame, may_run):
        self.came.append((frame.request, threading.current_thread().name))
        if frame.request in self.jobs and may_run:
            return self.jobs[frame.request]
        return None

    def _end(self, line, error) -> None:
        self.ended.append(str(error))

    def send(self, n: int, flags: int = 0) -> None:
        self.there.send(Frame(1, flags, n, b"", ()), time.monotonic() + 10)

    def has(self, n: int) -> bool:
        return any(request == n for request, _ in self.came)

    def reader_of(self, n: int) -> str:
        return next(thread for request, thread in self.came if request == n)

    def wait(self, n: int) -> None:
        self.lines.wait(self.here, lambda: self.has(n), lambda: eventually(lambda: self.has(n)))


@pytest.fixture
def desk():
    made = Desk()
    made.open()
    yield made
    made.here.close()
    made.lines.close()
    for thread in made.threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in made.threads)


def test_what_comes_is_read_by_its_reader(desk):
    desk.send(1)
    assert eventually(lambda: desk.has(1))
    assert desk.reader_of(1) == "read peer"


def after_an_answer(desk):
    """The reader has read an answer that nobody waits for any more, and lets others read."""
    desk.send(0, IS_ANSWER)
    assert eventually(lambda: any(line.parked for line in desk.lines._lines.values()))


def test_after_an_answer_whoever_waits_reads(desk):
    me = threading.current_thread().name
    for n in range(1, 50):
        after_an_answer(desk)
        desk.send(n, IS_ANSWER)
        desk.wait(n)
    readers = [desk.reader_of(n) for n in range(1, 50)]
    assert readers.count(me) > 25  # the watchdog may have been first now and then


def test_what_nobody_waits_for_is_found_by_the_keeper(desk):
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


def test_a_job_that_waits_does_not_leave_its_own_line_unread(desk):
    other = Desk()
    other.lines = desk.lines
    desk.lines.open(2, other.here, "other")
    after_an_answer(desk)

    def job():
        desk.lines.wait(other.here, lambda: desk.has(7), lambda: eventually(lambda: desk.has(7)))

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


def test_a_frame_that_cannot_be_taken_ends_the_channel_whoever_read_it(desk):
    after_an_answer(desk)

    def refuse(*_):
        raise ValueError("what is this?")

    desk.lines._on_frame = refuse
    desk.send(1)
    assert eventually(lambda: desk.ended)


def test_a_line_is_looked_after_until_a_reader_of_its_own_has_it():
    here, _ = MemoryNetwork().pair()
    spawned = []
    lines = ChannelReaders(lambda what, *_: spawned.append(what), lambda *_: None, lambda *_: None)
    lines.open(1, here, "peer")  # its reader is about to read, but does not get there yet
    (line,) = lines._lines.values()
    lines._keep(line)

    for _ in range(20):
        lines._look_at(line)
    assert line in lines._in_use
    assert spawned == ["keep", "read peer"]

    line.is_attended = True
    lines._look_at(line)
    assert line not in lines._in_use


def test_a_line_whose_reader_goes_on_while_it_is_looked_at_is_not_forgotten():
    class GoesOn(ChannelReader):
        """Its reader has the role at the first look, and at the second no more."""

        looks = 0

        @property
        def is_attended(self):
            self.looks += 1
            return self.looks == 1

        @is_attended.setter
        def is_attended(self, value):
            pass

    lines = ChannelReaders(lambda *_: None, lambda *_: None, lambda *_: None)
    line = GoesOn(1, MemoryNetwork().pair()[0], lines)
    lines._in_use[line] = None
    lines._look_at(line)
    assert line in lines._in_use


def test_a_reader_more_is_made_only_if_all_are_busy(desk):
    began, goes_on = threading.Event(), threading.Event()

    def job():
        began.set()
        assert goes_on.wait(20)

    (line,) = desk.lines._lines.values()
    desk.jobs[1] = job
    desk.send(1)
    assert began.wait(20)
    assert eventually(lambda: line.is_attended)
    for _ in range(5):
        desk.lines.attend(line)
    assert (len(line.readers), len(line.running)) == (2, 1)
    goes_on.set()
    assert eventually(lambda: not line.running)


def test_an_idle_line_has_its_reader_back_and_the_keeper_sleeps(desk):
    after_an_answer(desk)
    assert eventually(lambda: not desk.lines._in_use and not desk.lines._is_looking)
    (line,) = desk.lines._lines.values()
    assert eventually(lambda: line.role.locked())


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
    here._incoming._waiting = 1  # then who makes room has this lock
    return here, there, (here._incoming, "_room")


def read_by_this_thread(desk):
    """The line, whose role is ours."""
    (line,) = desk.lines._lines.values()
    after_an_answer(desk)
    while not line.role.acquire(blocking=False):
        after_an_answer(desk)
    return line


def read_for(desk, line, done):
    """Read with its role, and give that back as `wait` does."""
    try:
        desk.lines._read_for(line, done)
    finally:
        line.role.release()
        desk.lines.attend(line)


def test_an_interrupt_while_a_frame_is_handled_ends_the_channel_rather_than_lose_it(desk):
    line = read_by_this_thread(desk)
    desk.lines._on_frame = interrupt
    desk.send(1)
    with pytest.raises(KeyboardInterrupt):
        read_for(desk, line, lambda: False)
    assert eventually(lambda: desk.ended)


@pytest.mark.parametrize("size", [0, 1 << 16], ids=["read ahead", "read in parts"])
@pytest.mark.parametrize("ends", [socket_ends, memory_ends])
def test_an_interrupt_before_a_taken_frame_has_a_name_ends_the_channel(ends, size):
    here, there, (holder, lock) = ends()
    lines = ChannelReaders(lambda *_: None, lambda *_: None, lambda *_: None)
    lines.open(1, here, "peer")  # its reader does not get to read
    there.send(Frame(1, 0, 1, bytes(size), ()), time.monotonic() + 10)
    setattr(holder, lock, InterruptedOnce(getattr(holder, lock)))
    with pytest.raises(KeyboardInterrupt):
        lines.wait(here, lambda: False, lambda: None)
    with pytest.raises(PeerLost, match="interrupted while a message was taken"):
        here.maybe_recv(0.0)
    there.close()


def test_an_interrupt_while_nothing_comes_leaves_the_channel_in_order(desk):
    line = read_by_this_thread(desk)
    with pytest.raises(KeyboardInterrupt):
        read_for(desk, line, interrupt)
    desk.send(1)
    assert eventually(lambda: desk.has(1))
    assert not desk.ended


def interrupted_reader(desk, monkeypatch, where):
    """A finalizer runs on the reader where it is about to sleep or has just been woken, and waits
    for what comes by the same line."""
    (line,) = desk.lines._lines.values()
    waited = threading.Event()

    class Bed(SimpleQueue):
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
            desk.lines.wait(desk.here, lambda: desk.has(8), lambda: eventually(lambda: desk.has(8)))

    monkeypatch.setattr(lines_module, "SimpleQueue", Bed)
    return line, waited


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_reader_that_is_interrupted_as_it_sleeps_is_replaced(desk, monkeypatch, where):
    line, waited = interrupted_reader(desk, monkeypatch, where)
    desk.send(0, IS_ANSWER)  # then its reader sleeps

    def is_interrupted():
        desk.lines.attend(line)
        return waited.is_set()

    assert eventually(is_interrupted)
    desk.send(8)
    assert eventually(lambda: desk.has(8))
    desk.send(9)
    assert eventually(lambda: desk.has(9))


def test_a_keeper_that_is_interrupted_is_replaced(desk, monkeypatch):
    lines, first = desk.lines, desk.lines._keeper
    look_at = lines._look_at
    waited = threading.Event()

    def interrupted(line):
        if not waited.is_set():
            waited.set()
            lines.wait(desk.here, lambda: desk.has(8), lambda: eventually(lambda: desk.has(8)))
        return look_at(line)

    monkeypatch.setattr(lines, "_look_at", interrupted)
    after_an_answer(desk)
    assert waited.wait(10)
    assert eventually(lambda: lines._keeper is not first)
    desk.send(8)
    assert eventually(lambda: desk.has(8))
    assert eventually(lambda: sum(t.is_alive() and t.name == "keep" for t in desk.threads) == 1)
