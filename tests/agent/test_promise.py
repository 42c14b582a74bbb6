"""An outcome that comes once."""

from __future__ import annotations

import threading

import pytest

from gradwire.agent.promise import Promise


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


def test_a_wait_with_a_timeout_gives_up():
    with pytest.raises(TimeoutError):
        Promise().wait(0.001)
