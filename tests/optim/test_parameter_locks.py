"""Parameter locks: all or none, in order of arrival, and released if their worker is gone."""

from __future__ import annotations

import math
import threading

import pytest

from gradwire.errors import DeadlinePassed
from gradwire.ids import StepId
from gradwire.optim.parameter_locks import ParameterLocks
from gradwire.testing.clock import ManualClock

LATER = math.inf
A, B, C = StepId(1, 0), StepId(2, 0), StepId(2, 1)


class Undone:
    """What was prepared, until it is dropped."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def locks(clock):
    return ParameterLocks(clock)


def test_steps_over_other_parameters_do_not_meet(locks):
    assert locks.acquire(A, {1, 2}, LATER, wait=False)
    assert locks.acquire(B, {3}, LATER, wait=False)
    assert locks.acquire(C, {2, 4}, LATER, wait=False) is None
    assert len(locks) == 2


def test_a_turn_that_is_released_goes_to_who_waits(locks):
    first = locks.acquire(A, {1}, LATER, wait=False)
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(locks.acquire(B, {1}, LATER, wait=True)))
    waiting.start()

    locks.release(first)
    waiting.join(30)

    assert [lock.step for lock in taken] == [B]


def test_a_step_is_ended_once(locks):
    lock, undone = locks.acquire(A, {1}, LATER, wait=False), Undone()
    assert locks.ready(lock, undone)

    assert locks.claim(A) is lock
    assert locks.claim(A) is None
    locks.give_up(A)
    assert undone.times == 0
    locks.release(lock)
    assert locks.claim(A) is None


def test_a_step_that_is_given_up_while_it_prepares_is_not_ready(locks):
    lock = locks.acquire(A, {1}, LATER, wait=False)

    locks.give_up(A)

    assert not locks.ready(lock, Undone())
    assert len(locks) == 1  # until the one who prepares has dropped it


def test_the_steps_of_a_lost_worker_are_dropped(locks):
    undone = [Undone(), Undone()]
    for step, parameter, undo in ((A, 1, undone[0]), (B, 2, undone[1])):
        locks.ready(locks.acquire(step, {parameter}, LATER, wait=False), undo)

    locks.worker_lost(2)

    assert [undo.times for undo in undone] == [0, 1]
    assert len(locks) == 1


def test_a_late_step_makes_room_for_the_next(locks, clock):
    undone = Undone()
    locks.ready(locks.acquire(A, {1}, clock.now() + 1.0, wait=False), undone)
    assert locks.acquire(B, {1}, clock.now() + 9.0, wait=False) is None

    clock.advance(2.0)

    assert locks.acquire(B, {1}, clock.now() + 9.0, wait=False)
    assert undone.times == 1


def test_waiting_ends_at_the_deadline(locks, clock):
    locks.acquire(A, {1}, clock.now() + 10.0, wait=False)

    with pytest.raises(DeadlinePassed, match=r"s1\.0 of another optimizer had the same parameters"):
        locks.acquire(B, {1}, clock.now(), wait=True)
