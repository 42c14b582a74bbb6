"""Which of the things that go wrong in a run is told, in whatever order they are heard."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.launch.supervise_state import (
    CALLER,
    LINGER_SECONDS,
    Died,
    Failed,
    Overdue,
    RunState,
    Succeeded,
    WorkerStage,
)

PATIENCE = {"start": 10.0, "whole": 1000.0, "leave": 20.0}


def _starting(workers: int, now: float = 0, *, restarts: int = 0, **patience: float) -> RunState:
    return RunState(workers, now, restarts=restarts, **(PATIENCE | patience))


def _at_work(workers: int = 3, **patience: float) -> RunState:
    watch = _starting(workers, **patience)
    for worker in range(workers):
        watch.begun(worker)
    return watch


def test_a_run_in_which_all_leave_in_order_succeeds():
    watch = _at_work()
    watch.returned(100)
    for worker in (1, 2, 0):
        watch.left(worker)
        assert watch.verdict(101) is None
        watch.exited(worker, 0, 101)

    assert watch.verdict(101) == Succeeded()


def test_a_failure_is_told_at_once():
    watch = _at_work()
    watch.failed(CALLER, 5, of_lost_peer=False)

    assert watch.verdict(5) == Failed(CALLER)


def test_the_first_of_two_failures_is_told():
    watch = _at_work()
    watch.failed(2, 5, of_lost_peer=False)
    watch.failed(1, 5, of_lost_peer=False)

    assert watch.verdict(5) == Failed(2)


def test_the_exit_of_a_worker_that_failed_is_no_death():
    watch = _at_work()
    watch.failed(1, 5, of_lost_peer=False)
    watch.exited(1, 1, 5)

    assert watch.verdict(5) == Failed(1)


@given(st.permutations(["death", "failure"]), st.floats(0, LINGER_SECONDS * 0.99))
def test_a_death_is_the_cause_of_the_loss_that_was_felt(order, apart):
    watch = _at_work()
    for now, what in zip((5, 5 + apart), order, strict=True):
        assert watch.verdict(now) is None
        if what == "death":
            watch.exited(1, -9, now)
        else:
            watch.failed(CALLER, now, of_lost_peer=True)

    assert watch.verdict(5 + apart) == Died(1, -9, WorkerStage.WORKING, reported_by=CALLER)


def test_a_loss_that_no_death_explains_is_told_as_it_is():
    watch = _at_work()
    watch.failed(CALLER, 5, of_lost_peer=True)

    assert watch.verdict(5) is None
    assert watch.next_deadline() == 5 + LINGER_SECONDS
    assert watch.verdict(5 + LINGER_SECONDS) == Failed(CALLER)


def test_a_death_that_nobody_felt_is_told_as_it_is():
    watch = _at_work()
    watch.exited(2, 3, 5)

    assert watch.verdict(5) is None
    assert watch.next_deadline() == 5 + LINGER_SECONDS
    assert watch.verdict(5 + LINGER_SECONDS) == Died(2, 3, WorkerStage.WORKING, reported_by=None)


def test_the_first_of_two_deaths_is_told():
    watch = _at_work()
    watch.exited(2, 3, 5)
    watch.exited(1, 4, 5)

    assert watch.verdict(7) == Died(2, 3, WorkerStage.WORKING, reported_by=None)


def test_the_caller_s_death_is_told_at_once():
    watch = _at_work()
    watch.exited(CALLER, 0, 5)

    assert watch.verdict(5) == Died(CALLER, 0, WorkerStage.WORKING, reported_by=None)


def test_a_death_before_joining_is_told_at_once():
    watch = _starting(2)
    watch.exited(1, 1, 5)

    assert watch.verdict(5) == Died(1, 1, WorkerStage.STARTING, reported_by=None)


def test_a_process_that_breaks_while_it_ends_is_told():
    watch = _at_work(1)
    watch.returned(5)
    watch.left(CALLER)
    watch.exited(CALLER, -11, 6)

    assert watch.verdict(6) == Died(CALLER, -11, WorkerStage.LEFT, reported_by=None)


def test_those_that_do_not_start_in_time_are_told():
    watch = _starting(3, 100)
    watch.begun(1)

    assert watch.next_deadline() == 110
    assert watch.verdict(109) is None
    assert watch.verdict(110) == Overdue((0, 2), WorkerStage.WORKING)


def test_a_function_may_take_as_long_as_the_run():
    watch = _at_work()

    assert watch.next_deadline() == 1000
    assert watch.verdict(999) is None
    assert watch.verdict(1000) == Overdue((CALLER,), WorkerStage.LEAVING)
    assert _at_work(whole=math.inf).next_deadline() == math.inf


def test_those_that_stay_too_long_are_told():
    watch = _at_work()
    watch.returned(100)
    watch.left(CALLER)
    watch.exited(CALLER, 0, 101)

    assert watch.next_deadline() == 120
    assert watch.verdict(120) == Overdue((1, 2), WorkerStage.LEFT)


@pytest.mark.parametrize("workers", [1, 2, 3])
@settings(max_examples=50)
@given(data=st.data())
def test_a_run_ends_with_one_verdict_whatever_happens(workers, data):
    watch, now, going = _starting(workers), 0.0, set(range(workers))
    while watch.verdict(now) is None:
        deadline = watch.next_deadline()
        assert deadline > now
        if not data.draw(st.booleans()):
            now = deadline
            continue
        worker = data.draw(st.sampled_from(sorted(going)))
        match data.draw(st.sampled_from(["begun", "failed", "left", "exited"])):
            case "begun":
                watch.begun(worker)
            case "failed":
                watch.failed(worker, now, of_lost_peer=data.draw(st.booleans()))
            case "left":
                watch.left(worker)
            case _:
                watch.exited(worker, data.draw(st.sampled_from([0, 1, -9])), now)
                going.discard(worker)
        now += 0.5


def _restartable(restarts: int = 1, workers: int = 3) -> RunState:
    watch = _starting(workers, restarts=restarts)
    for worker in range(workers):
        watch.begun(worker)
    return watch


@pytest.mark.parametrize("worker", [CALLER, 2])
def test_a_worker_that_died_is_started_again_and_told_once(worker):
    watch = _restartable()

    assert watch.exited(worker, -9, 50) == Died(worker, -9, WorkerStage.WORKING)
    assert watch.verdict(50) is None
    assert watch.next_deadline() == 60
    assert watch.verdict(60) == Overdue((worker,), WorkerStage.WORKING)
    watch.begun(worker)
    assert watch.verdict(61) is None


def test_each_has_its_own_number_of_restarts():
    watch = _restartable()
    for worker in (1, 2):
        assert watch.exited(worker, 1, 50) is not None
        watch.begun(worker)

    assert watch.exited(1, -9, 70) is None
    assert watch.verdict(70 + LINGER_SECONDS) == Died(1, -9, WorkerStage.WORKING, None)


def test_one_that_cannot_import_the_script_is_not_started_again():
    watch = _starting(2, restarts=5)

    assert watch.exited(1, 1, 3) is None
    assert watch.verdict(3) == Died(1, 1, WorkerStage.STARTING, None)


def test_one_that_is_killed_while_it_starts_is_started_again():
    watch = _starting(2, restarts=5)

    assert watch.exited(1, -9, 3) == Died(1, -9, WorkerStage.STARTING)


def test_nobody_is_started_again_once_the_run_has_failed():
    watch = _restartable()
    watch.failed(CALLER, 10, of_lost_peer=True)

    assert watch.exited(1, -9, 11) is None
    assert watch.verdict(12) == Died(1, -9, WorkerStage.WORKING, CALLER)


def test_who_dies_when_the_function_has_returned_died_after_return():
    watch = _restartable(workers=2)
    watch.returned(10)
    assert watch.exited(1, -9, 11) is None
    watch.left(CALLER)

    assert watch.exited(CALLER, 0, 12) is None
    assert watch.verdict(12) == Succeeded()


def test_the_death_of_the_caller_on_its_way_out_is_told():
    watch = _restartable(workers=2)
    watch.returned(10)
    watch.exited(CALLER, -9, 11)

    assert watch.verdict(11) == Died(CALLER, -9, WorkerStage.LEAVING, None)


def test_a_failure_that_was_told_is_no_death():
    watch = _restartable()
    watch.failed(2, 10, of_lost_peer=False)

    assert watch.exited(2, 1, 11) is None
    assert watch.verdict(11) == Failed(2)
