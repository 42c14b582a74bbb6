"""A signal handler that raises where a promise is settled: whoever waits is told all the same."""

from __future__ import annotations

import signal
import threading

import pytest

import gradwire.testing
from gradwire.agent.agent import Answer
from gradwire.agent.messages import Done
from gradwire.agent.requests.promise import Pending, Promise, RequestTable
from gradwire.errors import Cancelled
from gradwire.wire.message import IS_ANSWER, Frame, encode, kind_of


def interrupt(*_):
    signal.raise_signal(signal.SIGINT)


def test_a_promise_whose_callback_is_interrupted_tells_the_others():
    promise, told = Promise(), []
    waiting = threading.Thread(target=lambda: told.append(promise.wait(10)))
    waiting.start()
    promise.on_settled(interrupt)
    promise.on_settled(told.append)

    with pytest.raises(KeyboardInterrupt):
        promise.settle(7)
    waiting.join(10)

    assert promise.settled
    assert told == [7, 7]


@pytest.fixture
def agent():
    with gradwire.testing.cluster(2) as workers:
        yield workers[0].worker.agent


def pending_in(agent):
    limit = agent.clock.now() + 60
    pending = Pending(1, "a call of another thread", agent.clock.now(), limit, Promise())
    pending.promise.request = agent._calls.opened(pending)
    return pending


def interrupt_once(monkeypatch, method):
    """When this method of the table of requests returns, a signal handler raises."""
    real = getattr(RequestTable, method)

    def interrupted(self, *args):
        monkeypatch.setattr(RequestTable, method, real)
        found = real(self, *args)
        interrupt()
        return found

    monkeypatch.setattr(RequestTable, method, interrupted)


def test_a_request_that_was_taken_out_is_settled_by_its_answer(agent, monkeypatch):
    pending = pending_in(agent)
    answer = Frame(kind_of(Done), IS_ANSWER, pending.n, encode(Done()), ())
    interrupt_once(monkeypatch, "answered")

    with pytest.raises(KeyboardInterrupt):
        agent._answer_came(1, answer)

    assert pending.promise.wait(1) == Answer(Done(), None)


def test_a_request_that_was_taken_out_is_cancelled(agent, monkeypatch):
    pending = pending_in(agent)
    interrupt_once(monkeypatch, "cancelled")

    with pytest.raises(KeyboardInterrupt):
        agent.cancel(pending.promise, "for a test")

    assert isinstance(pending.promise.wait(1), Cancelled)
    assert agent.in_flight == 0
