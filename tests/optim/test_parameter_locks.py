"""Turns: whole or not at all, first come first served, and taken back from those who are gone."""

from __future__ import annotations

import math
import threading

import pytest

from gradwire.errors import DeadlinePassed
from gradwire.optim.parameter_locks import StepId, Turns
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
def turns(clock):
    return Turns(clock)


def test_steps_over_other_parameters_do_not_meet(turns):
    assert turns.take(A, {1, 2}, LATER, wait=False)
    assert turns.take(B, {3}, LATER, wait=False)
    assert turns.take(C, {2, 4}, LATER, wait=False) is None
    assert len(turns) == 2


def test_a_turn_that_is_released_goes_to_who_waits(turns):
    first = turns.take(A, {1}, LATER, wait=False)
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(turns.take(B, {1}, LATER, wait=True)))
    waiting.start()

    turns.release(first)
    waiting.join(30)

    assert [turn.step for turn in taken] == [B]


def test_a_step_is_ended_once(turns):
    turn, undone = turns.take(A, {1}, LATER, wait=False), Undone()
    assert turns.ready(turn, undone)

    assert turns.claim(A) is turn
    assert turns.claim(A) is None
    turns.give_up(A)
    assert undone.times == 0
    turns.release(turn)
    assert turns.claim(A) is None


def test_a_step_that_is_given_up_while_it_prepares_is_not_ready(turns):
    turn = turns.take(A, {1}, LATER, wait=False)

    turns.give_up(A)

    assert not turns.ready(turn, Undone())
    assert len(turns) == 1  # until the one who prepares has dropped it


def test_the_steps_of_a_lost_worker_are_dropped(turns):
    undone = [Undone(), Undone()]
    for step, parameter, undo in ((A, 1, undone[0]), (B, 2, undone[1])):
        turns.ready(turns.take(step, {parameter}, LATER, wait=False), undo)

    turns.worker_lost(2)

    assert [undo.times for undo in undone] == [0, 1]
    assert len(turns) == 1


def test_a_late_step_makes_room_for_the_next(turns, clock):
    undone = Undone()
    turns.ready(turns.take(A, {1}, clock.now() + 1.0, wait=False), undone)
    assert turns.take(B, {1}, clock.now() + 9.0, wait=False) is None

    clock.advance(2.0)

    assert turns.take(B, {1}, clock.now() + 9.0, wait=False)
    assert undone.times == 1


def test_waiting_ends_at_the_deadline(turns, clock):
    turns.take(A, {1}, clock.now() + 10.0, wait=False)

    with pytest.raises(DeadlinePassed, match=r"s1\.0 of another optimizer had the same parameters"):
        turns.take(B, {1}, clock.now(), wait=True)
