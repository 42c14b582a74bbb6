"""Deadlines are watched by a clock that the test moves."""

from __future__ import annotations

import threading

from gradwire.agent.requests.timer import Resender, Timer
from gradwire.testing.clock import ManualClock
from tests.leftovers import eventually


class Alarms:
    """A watcher that notes what was late."""

    def __init__(self):
        self.deadlines, self.rang = [], threading.Semaphore(0)

    def expire(self, now):
        late = [deadline for deadline in self.deadlines if deadline <= now]
        self.deadlines = [deadline for deadline in self.deadlines if deadline > now]
        for _ in late:
            self.rang.release()
        return min(self.deadlines, default=None)


def test_what_is_late_is_found_when_the_clock_gets_there():
    clock, alarms = ManualClock(), Alarms()
    timer = Timer("gradwire test timer", clock)
    timer.watch(alarms.expire)
    start = clock.now()
    for seconds in (3.0, 1.0, 2.0):
        alarms.deadlines.append(start + seconds)
        timer.need(start + seconds)

    clock.advance(1.0)
    assert alarms.rang.acquire(timeout=10)
    assert not alarms.rang.acquire(blocking=False)
    clock.advance(2.0)
    assert alarms.rang.acquire(timeout=10)
    assert alarms.rang.acquire(timeout=10)
    timer.close()


def test_a_timer_that_watches_nothing_has_no_thread():
    before = threading.active_count()
    timer = Timer("gradwire test timer", ManualClock())
    timer.watch(lambda _: None)

    assert threading.active_count() == before
    timer.close()
    timer.close()


def test_a_watcher_that_fails_does_not_end_the_watch():
    clock, alarms, failed = ManualClock(), Alarms(), []
    timer = Timer("gradwire test timer", clock)

    def broken(_):
        failed.append(True)
        raise RuntimeError("broken")

    timer.watch(broken)
    timer.watch(alarms.expire)
    alarms.deadlines.append(clock.now() + 1.0)
    timer.need(clock.now() + 1.0)
    clock.advance(1.0)

    assert alarms.rang.acquire(timeout=10)
    assert failed
    timer.close()


def test_a_message_is_sent_again_when_its_time_has_come_and_not_before():
    clock, sent = ManualClock(), []
    timer = Timer("test", clock)
    resender = Resender(timer, sent.append)
    resender.keep("later", 10.0)
    resender.keep("sooner", 5.0)

    clock.advance(6.0)
    assert eventually(lambda: sent == [["sooner"]])
    clock.advance(5.0)
    assert eventually(lambda: sent == [["sooner"], ["later"]])
    timer.close()
