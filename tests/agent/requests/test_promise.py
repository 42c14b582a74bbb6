"""An outcome that comes once."""

from __future__ import annotations

import threading

import pytest

from gradwire.agent.requests.promise import Promise


def test_the_first_outcome_wins():
    promise = Promise()

    assert promise.settle("first")
    assert not promise.settle("second")
    assert promise.wait() == "first"


def test_every_waiting_thread_wakes():
    promise, got = Promise(), []
    threads = [threading.Thread(target=lambda: got.append(promise.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    promise.settle(7)
    for thread in threads:
        thread.join(10)

    assert got == [7] * 4


def test_callbacks_run_when_it_is_settled_or_at_once():
    promise, got = Promise(), []
    promise.on_settled(got.append)
    assert got == []
    promise.settle(1)
    promise.on_settled(got.append)

    assert got == [1, 1]


def test_a_callback_that_is_added_while_it_is_settled_is_called_once():
    for _ in range(300):
        promise, start, calls, waits, won = Promise(), threading.Barrier(7), [], [], []

        def act(what, promise=promise, start=start):
            start.wait()
            what(promise)

        jobs = [lambda p, won=won: won.append(p.settle("outcome"))] * 2
        jobs += [lambda p, calls=calls: p.on_settled(lambda it: calls.append(it))] * 3
        jobs += [lambda p, waits=waits: waits.append(p.wait(10))] * 2
        threads = [threading.Thread(target=act, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert (calls, waits) == (["outcome"] * 3, ["outcome"] * 2)
        assert sorted(won) == [False, True]


def test_a_callback_that_adds_another_finds_the_outcome_there():
    promise, got = Promise(), []
    promise.on_settled(lambda it: promise.on_settled(got.append))
    promise.on_settled(got.append)
    promise.settle(1)

    assert got == [1, 1]


def test_a_callback_that_fails_keeps_the_outcome_from_nobody(caplog):
    promise, got = Promise(), []
    promise.on_settled(lambda it: 1 / 0)
    promise.on_settled(got.append)
    assert promise.settle(1)

    assert got == [1]
    assert "a callback failed" in caplog.text


def test_a_wait_with_a_timeout_gives_up():
    with pytest.raises(TimeoutError):
        Promise().wait(0.001)


def test_a_callback_that_is_interrupted_is_called_again():
    """By Ctrl-C, which may come before it has done anything."""
    promise, called = Promise(), []

    def interrupted(outcome):
        called.append(outcome)
        if len(called) == 1:
            raise KeyboardInterrupt

    promise.on_settled(interrupted)
    promise.on_settled(called.append)
    with pytest.raises(KeyboardInterrupt):
        promise.settle(7)

    assert called == [7, 7, 7]
