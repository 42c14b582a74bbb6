"""The answer to a call accepts references that were passed to their owner."""

from __future__ import annotations

import sys
import threading

import pytest

import gradwire as gw
from gradwire.errors import BadMessage, CallTimeout
from gradwire.ids import ForkId, RefId
from gradwire.rpc.messages import Drop
from tests.gates import GATES
from tests.leftovers import assert_nothing_left, eventually
from tests.listening import overheard

HERE = sys.modules[__name__]


@pytest.fixture
def cluster_and_said():
    with overheard(3, expose=[HERE]) as both:
        yield both
        assert_nothing_left(both[0])


@pytest.fixture
def workers(cluster_and_said):
    return cluster_and_said[0]


@pytest.fixture
def said(cluster_and_said):
    return cluster_and_said[1]


class Box:
    def __init__(self, content):
        self.content = content

    def get(self):
        return self.content

    def refuse(self):
        raise ValueError(self.content)

    def wait(self):
        GATES["box"].wait(10)


def contents(boxes):
    return [box.local_value().content for box in boxes]


@gw.async_execution
def one_day(box):
    return gw.rpc_async("w2", contents_of_none, args=())


def contents_of_none():
    GATES["box"].wait(10)


def boxes_on_w1(*contents):
    made = [gw.remote("w1", Box, args=(content,)) for content in contents]
    for box in made:
        box.rpc_sync().get()
    return made


def children(worker):
    return worker.worker.refs.statistics().pending_children


def test_a_call_on_a_reference_is_two_messages(workers, said):
    def program():
        (box,) = boxes_on_w1(7)
        said.clear()
        assert box.rpc_sync().get() == 7
        assert box.rpc_async().get().wait() == 7
        return said.names(), children(workers[0])

    assert workers[0].run(program) == (["Call", "Result"] * 2, 0)


def test_many_references_come_home_with_one_answer(workers, said):
    def program():
        boxes = boxes_on_w1(*range(20))
        said.clear()
        assert gw.rpc_sync("w1", contents, args=(boxes,)) == list(range(20))
        return said.names(), children(workers[0])

    assert workers[0].run(program) == (["Call", "Result"], 0)


def test_a_call_that_raises_accepts_too(workers, said):
    def program():
        (box,) = boxes_on_w1(7)
        said.clear()
        with pytest.raises(ValueError, match="7"):
            box.rpc_async().refuse().wait()
        return eventually(lambda: "Accept" in said.names() and not children(workers[0]))

    assert workers[0].run(program)


def test_a_call_that_was_given_up_accepts_too(workers):
    GATES["box"] = threading.Event()

    def program():
        (box,) = boxes_on_w1(7)
        with pytest.raises(CallTimeout):
            box.rpc_async(timeout=0.05).wait().wait()
        assert children(workers[0]) == 1
        GATES["box"].set()
        return eventually(lambda: not children(workers[0]))

    assert workers[0].run(program)


def test_a_call_that_answers_one_day_accepts_at_once(workers):
    GATES["box"] = threading.Event()

    def program():
        (box,) = boxes_on_w1(7)
        call = gw.rpc_async("w1", one_day, args=(box,))
        accepted = eventually(lambda: not children(workers[0]))
        GATES["box"].set()
        call.wait()
        return accepted

    assert workers[0].run(program)


def test_a_fork_of_another_worker_is_not_accepted_by_an_answer(workers):
    GATES["box"] = threading.Event()

    def program():
        (box,) = boxes_on_w1(7)
        call = box.rpc_async().wait()  # w1 has yet to accept its fork
        assert eventually(lambda: children(workers[0]) == 1)
        (fork,) = workers[0].worker.refs._table._children
        with pytest.raises(BadMessage, match="w2 may not end"):
            workers[0].worker.refs.piggybacked.answer_arrived([fork], 2)
        assert children(workers[0]) == 1
        GATES["box"].set()
        call.wait()

    workers[0].run(program)


def test_references_that_end_together_share_messages(workers, said):
    def program():
        boxes = [gw.remote("w1", Box, args=(n,)) for n in range(300)]
        assert eventually(lambda: all(box.confirmed_by_owner() for box in boxes))
        said.clear()
        refs = workers[0].worker.refs
        with refs._lock:  # nothing is sent before all are queued
            refs.abandon()
        assert eventually(lambda: not refs.pending)
        assert workers[1].worker.refs.statistics().owned == 0
        return sorted(said.names())

    assert workers[0].run(program) == ["Done", "Done", "Drop", "Drop"]


def test_one_end_without_right_in_a_message_ends_nothing(workers):
    def program():
        (box,) = boxes_on_w1(7)
        ref, fork = box.handle.ref, box.handle.fork
        stranger = workers[2].worker
        theirs = RefId(2, 0), ForkId(2, 0)
        drop = Drop([theirs, (ref, fork)], 0)
        deadline = stranger.agent.clock.now() + 10
        _, answer = stranger.agent.request(1, drop, deadline=deadline, description="a Drop")
        assert isinstance(answer.wait(10), BadMessage)
        return box.rpc_sync().get()

    assert workers[0].run(program) == 7
