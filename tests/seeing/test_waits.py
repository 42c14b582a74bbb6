"""Who waits for whom, from statuses alone."""

from __future__ import annotations

import pytest

from gradwire.options import FOREVER
from gradwire.seeing.status import Doing, Served, doing
from gradwire.seeing.waits import CYCLE_SECONDS, cycles_of, waits_of
from tests.seeing.statuses import backward, request, status


def short(waits):
    return [(wait.worker, wait.peer, wait.in_cycle) for wait in waits]


def test_the_oldest_wait_is_first():
    waits = waits_of([status("w0", request("w1", age=1.0)), status("w1", request("w2", age=9.0))])

    assert [(wait.worker, wait.age) for wait in waits] == [("w1", 9.0), ("w0", 1.0)]


def test_a_wait_says_what_for_whom_and_until_when():
    (wait,) = waits_of([status("w0", request("w1", what="torch.sin", age=3.0, left=57.0))])

    assert (wait.what, wait.age, wait.left, wait.ends_at) == ("torch.sin", 3.0, 57.0, ("w1",))


def test_a_wait_without_a_deadline_has_none():
    (wait,) = waits_of([status("w0", request("w1", left=FOREVER - 3))])

    assert wait.left is None


def test_workers_that_wait_for_each_other_are_a_cycle():
    waits = waits_of([status("w0", request("w1")), status("w1", request("w0", n=4))])

    assert cycles_of(waits) == [["w0", "w1"]]
    assert short(waits) == [("w0", "w1", True), ("w1", "w0", True)]


def test_a_cycle_of_many_is_one_and_who_waits_for_it_is_not_in_it():
    ring = [status(f"w{n}", request(f"w{(n + 1) % 4}")) for n in range(4)]

    waits = waits_of([*ring, status("w9", request("w0"))])

    assert cycles_of(waits) == [["w0", "w1", "w2", "w3"]]
    assert short(waits)[-1] == ("w9", "w0", False)


def test_two_cycles_are_told_apart():
    pairs = [("w0", "w1"), ("w1", "w0"), ("w2", "w3"), ("w3", "w2")]

    waits = waits_of([status(a, request(b)) for a, b in pairs])

    assert cycles_of(waits) == [["w0", "w1"], ["w2", "w3"]]


def test_a_call_that_calls_back_is_no_cycle():
    back = request("w0", n=8, made_for=("w0", 1))

    waits = waits_of([status("w0", request("w1", n=1)), status("w1", back)])

    assert cycles_of(waits) == []
    assert {wait.worker: wait.ends_at for wait in waits} == {"w0": ("w0",), "w1": ("w0",)}


def test_a_chain_of_calls_ends_where_the_last_function_runs():
    chain = [
        status("w0", request("w1", n=1)),
        status("w1", request("w2", n=5, made_for=("w0", 1))),
        status("w2", request("w3", n=6, made_for=("w1", 5))),
    ]

    assert {wait.ends_at for wait in waits_of(chain)} == {("w3",)}


def test_a_cycle_through_a_chain_marks_every_wait_of_the_chain():
    waits = waits_of(
        [
            status("w0", request("w1", n=1)),
            status("w1", request("w2", n=5, made_for=("w0", 1))),
            status("w2", request("w0", n=3)),
        ]
    )

    assert cycles_of(waits) == [["w0", "w2"]]
    assert all(wait.in_cycle for wait in waits)


def test_young_waits_make_no_cycle():
    young = CYCLE_SECONDS / 2

    waits = waits_of([status("w0", request("w1", age=young)), status("w1", request("w0"))])

    assert cycles_of(waits) == []
    assert not any(wait.in_cycle for wait in waits)


def test_a_pass_waits_for_the_worker_whose_gradients_are_missing():
    waiting = backward(awaited=(("e0.3", "w1"),))

    (wait,) = waits_of([status("w0", passes=(waiting,))])

    assert (wait.peer, wait.what) == ("w1", "the gradients of e0.3 in p0.1")


def test_a_pass_waits_for_the_workers_that_are_not_done():
    waits = waits_of([status("w0", passes=(backward(not_done=("w1", "w2")),))])

    assert [(wait.peer, wait.what) for wait in waits] == [
        ("w1", "the end of p0.1"),
        ("w2", "the end of p0.1"),
    ]


@pytest.mark.parametrize(("runs", "is_cycle"), [(True, False), (False, True)])
def test_a_backward_that_runs_where_its_caller_waits_is_no_cycle(runs, is_cycle):
    there = backward("p1.1", "w1", awaited=(("e1.0", "w0"),))
    here = backward("p1.1", "w1", runs=runs)

    waits = waits_of([status("w0", request("w1"), passes=(here,)), status("w1", passes=(there,))])

    assert bool(cycles_of(waits)) is is_cycle


@pytest.mark.parametrize(
    ("known", "what"),
    [
        (status("w1"), Doing.IDLE),
        (status("w0", has_program=True), Doing.RUNS),
        (status("w0", request("w1"), has_program=True), Doing.WAITS),
        (status("w1", serves=(Served("w0", 4, "f", 1.0),)), Doing.RUNS),
        (status("w1", serves=(Served("w0", 4, "f", None),)), Doing.IDLE),
        (
            status("w1", request("w2", made_for=("w0", 4)), serves=(Served("w0", 4, "f", 1.0),)),
            Doing.WAITS,
        ),
        (
            status("w1", request("w2", made_for=("w0", 4)), serves=(Served("w0", 5, "f", 1.0),)),
            Doing.RUNS,
        ),
        (status("w1", passes=(backward(),)), Doing.RUNS),
        (status("w1", passes=(backward(awaited=(("e1.0", "w0"),)),)), Doing.WAITS),
        (status("w1", passes=(backward(runs=False),)), Doing.IDLE),
    ],
    ids=str,
)
def test_what_a_worker_does_in_one_word(known, what):
    assert doing(known) is what
