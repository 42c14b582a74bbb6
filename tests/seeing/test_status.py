"""What a worker says of itself, to itself and to its peers."""

from __future__ import annotations

import os
import threading
from functools import partial

import pytest
import torch

import gradwire
from gradwire.agent.agent import Answer
from gradwire.errors import BadMessage
from gradwire.seeing.stacks import FrameText, ThreadStack, stacks_of_this_process, text_of
from gradwire.seeing.status import (
    MOST_LISTED,
    MOST_STACKS,
    MOST_TEXT,
    AskStacks,
    AskStatus,
    Doing,
    Stacks,
    Status,
    clipped,
    clipped_left,
    doing,
)
from gradwire.seeing.status_reading import ASKING, StatusReading
from gradwire.testing import cluster
from gradwire.wire.message import Kinds, encode, kind_of
from tests.gates import GATES
from tests.leftovers import eventually
from tests.seeing.statuses import request, status

SECONDS = 20.0


@gradwire.expose
def wait_here(gate):
    assert GATES[gate].wait(SECONDS)
    return torch.ones(1)


@gradwire.expose
def wait_there(gate, worker):
    return gradwire.rpc_sync(worker, wait_here, args=(gate,))


@gradwire.expose
class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.gate = gate
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        assert GATES[ctx.gate].wait(SECONDS)
        return grad, None


@gradwire.expose
def slow_backward(x, gate):
    return SlowBackward.apply(x, gate)


@pytest.fixture
def workers():
    with cluster(3) as made:
        yield made


def now(member):
    return member.worker.part(StatusReading).now()


def asked(member, peer, message):
    agent = member.worker.agent
    _, promise = agent.request(
        peer, message, deadline=agent.clock.now() + SECONDS, description="asked", phase=ASKING
    )
    return promise.wait(SECONDS)


def until(look):
    """What a look finds, once it finds something."""
    found = []

    def looked():
        found[:] = [look()]
        return found[0]

    assert eventually(looked, SECONDS)
    return found[0]


def test_a_worker_answers_its_status_to_any_peer(workers):
    answer = asked(workers[0], 1, AskStatus())

    assert isinstance(answer, Answer)
    told = answer.message
    assert isinstance(told, Status)
    assert (told.worker, told.incarnation, told.pid) == ("w1", 0, os.getpid())
    assert told.has_program
    assert told.threads > 1
    assert told.rss > 1 << 20


def test_a_question_for_a_status_is_no_request_that_waits(workers):
    told = []
    workers[1].worker.agent.dispatch.service.submit(lambda: told.append(now(workers[0])))
    asked(workers[0], 1, AskStatus())
    until(lambda: told)

    assert told[0].in_flight == []
    assert now(workers[0]).in_flight == []


def test_a_nested_call_is_seen_at_each_worker(workers, gate):
    future = workers[0].run(gradwire.rpc_async, "w1", wait_there, (gate, "w2"), timeout=50.0)
    runs = until(lambda: [each for each in now(workers[2]).serves if each.age is not None])

    (first,) = now(workers[0]).in_flight
    between = now(workers[1])
    (served,), (second,) = between.serves, between.in_flight
    (last,) = runs
    GATES[gate].set()
    future.wait()

    assert (first.peer, first.made_for) == ("w1", None)
    assert "wait_there" in first.what
    assert 0 <= first.age < first.left <= 50.0
    assert (served.peer, served.n) == ("w0", first.n)
    assert "wait_there" in served.what
    assert (second.peer, second.made_for) == ("w2", ("w0", first.n))
    assert (last.peer, last.n) == ("w1", second.n)
    assert "wait_here" in last.what
    assert doing(between) is Doing.WAITS


def test_a_function_whose_result_is_kept_is_seen_while_it_runs(workers, gate):
    ref = workers[0].run(gradwire.remote, "w1", wait_here, (gate,))
    (served,) = until(lambda: now(workers[1]).serves)
    assert "wait_here" in served.what

    GATES[gate].set()
    workers[0].run(ref.to_here)

    until(lambda: not now(workers[1]).serves)


def test_a_pass_is_seen_at_both_workers_with_the_edge_that_is_awaited(workers, gate):
    def train():
        x = torch.ones(1, requires_grad=True)
        gradwire.rpc_sync("w1", slow_backward, args=(x, gate)).sum().backward()

    thread = threading.Thread(target=workers[0].run, args=(train,))
    thread.start()
    try:
        (mine,) = until(lambda: [p for p in now(workers[0]).passes if p.awaited or p.not_done])
        (theirs,) = until(lambda: [p for p in now(workers[1]).passes if p.runs])
    finally:
        GATES[gate].set()
        thread.join()

    assert mine.id == theirs.id
    assert (mine.coordinator, theirs.coordinator) == ("w0", "w0")
    assert mine.runs
    assert {peer for _, peer in mine.awaited} | {*mine.not_done} == {"w1"}
    assert (theirs.awaited, theirs.not_done) == ([], [])
    assert now(workers[0]).passes == []


def test_edges_are_listed_with_the_line_that_sent_them(workers):
    x = torch.ones(4, requires_grad=True)
    y = workers[0].run(gradwire.rpc_sync, "w1", torch.sin, (x,))

    (edge,) = now(workers[0]).edges
    assert (edge.to, edge.bytes) == ("w1", 16)
    assert "test_status.py" in edge.line
    assert now(workers[0]).totals.edges == 1
    del y


def test_what_is_counted_and_exchanged(workers):
    for _ in range(3):
        workers[0].run(gradwire.rpc_sync, "w1", torch.sin, (torch.ones(1000),))
    with pytest.raises(TypeError):
        workers[0].run(gradwire.rpc_sync, "w1", torch.sin, ())

    mine, theirs = now(workers[0]), now(workers[1])

    assert (mine.totals.calls_made, mine.totals.calls_failed) == (4, 1)
    assert until(lambda: now(workers[1]).totals.calls_served == 4)
    (sent,) = [each for each in mine.traffic if each.peer == "w1"]
    (received,) = [each for each in theirs.traffic if each.peer == "w0"]
    assert received.received_bytes == sent.sent_bytes > 12000


def test_a_worker_whose_program_is_over_only_serves(workers):
    leaving = [
        threading.Thread(target=partial(member.worker.shutdown, graceful=True))
        for member in workers
    ]
    leaving[1].start()
    until(lambda: not now(workers[1]).has_program)
    assert now(workers[0]).has_program

    for thread in (leaving[0], leaving[2]):
        thread.start()
    for thread in leaving:
        thread.join()


@pytest.mark.slow
def test_a_status_has_a_bounded_size(workers, gate):
    calls = [
        workers[0].run(gradwire.rpc_async, "w1", wait_here, (gate,)) for _ in range(MOST_LISTED + 9)
    ]
    told = now(workers[0])
    GATES[gate].set()
    for call in calls:
        call.wait()

    assert len(told.in_flight) == MOST_LISTED
    assert told.totals.in_flight == MOST_LISTED + 9


@pytest.mark.parametrize(
    "wrong",
    [
        status("w" * (MOST_TEXT + 1)),
        status("w1", *[request("w0", n) for n in range(MOST_LISTED + 1)]),
        status("w1", request("w0", age=float("inf"))),
        status("w1", pid=-1),
        Stacks("x" * (MOST_STACKS + 1)),
    ],
    ids=["name", "list", "age", "pid", "stacks"],
)
def test_a_status_that_no_worker_sends_is_refused(wrong):
    kinds = Kinds([Status, Stacks])

    with pytest.raises(BadMessage):
        kinds.decode(kind_of(type(wrong)), encode(wrong))


def test_long_names_are_cut():
    assert clipped("a" * 500) == "a" * (MOST_TEXT - 1) + "…"
    assert clipped_left("/x" * 500 + "/train.py:3").endswith("/train.py:3")
    assert len(clipped_left("/x" * 500)) == MOST_TEXT
    assert clipped("ok") == "ok"


def test_texts_that_utf8_cannot_hold_can_be_sent():
    name = "/home/\udce9/train.py"

    assert encode(Stacks(text_of([ThreadStack(name, [])])))
    assert clipped(name) == clipped_left(name) == "/home/?/train.py"


# -- stacks


def test_stacks_of_a_peer_name_the_line_of_the_user_first(workers, gate):
    future = workers[0].run(gradwire.rpc_async, "w1", wait_here, (gate,))
    until(lambda: [each for each in now(workers[1]).serves if each.age is not None])

    answer = asked(workers[0], 1, AskStacks())
    GATES[gate].set()
    future.wait()

    stacks = answer.message.text.split("\n\n")
    (thread,) = [stack for stack in stacks if " in wait_here" in stack]
    lines = thread.splitlines()
    assert lines[0].startswith("gradwire w1 ")
    assert "test_status.py" in lines[1]
    assert lines[2].strip().startswith("assert GATES[gate].wait(")
    of_users = ["  > " in stack for stack in stacks]
    assert of_users == sorted(of_users, reverse=True)


def test_the_thread_that_asks_for_stacks_is_not_among_them():
    assert "stacks_of_this_process" not in stacks_of_this_process()


def test_stacks_have_a_bounded_size():
    frame = FrameText("a.py:1 in f", "x" * 120, True)
    many = [ThreadStack(f"t{n}", [frame] * 1000) for n in range(1000)]

    text = text_of(many)

    assert len(text) <= MOST_STACKS
    few = text_of([ThreadStack("t", [frame] * 50)])
    assert few.splitlines()[-1].strip() == "… and 10 more frames"
