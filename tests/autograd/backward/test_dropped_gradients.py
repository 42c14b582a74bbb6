"""Gradients that no Send takes: the edges by which they came (create_graph) are released."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire import GradwireError, Limits, Options, OverLimit, Timeouts, UsageError
from gradwire.agent.serving.dispatch import Source
from gradwire.autograd import engine
from gradwire.autograd.graph.lineage import one, to_wire
from gradwire.autograd.messages import Crossing, Gradients, Start
from gradwire.errors import BadMessage, DeadlinePassed, NotSerializable
from gradwire.ids import EdgeId, PassId
from gradwire.testing import cluster
from gradwire.wire.tensor import encode_tensors
from tests.leftovers import assert_nothing_left, eventually


def pair(x, _):
    return x


THEIRS = EdgeId(1, 99)
"""an edge of w1, which w0 is to release"""
PASS = PassId(1, 1)


@pytest.fixture
def w0():
    """The engine of w0, which has sent a tensor to w1."""
    with cluster(2) as workers:
        engine = workers[0].worker.engine
        engine.releases.stop()  # what is queued stays to be seen
        x = torch.ones(2, requires_grad=True)
        kept = workers[0].run(gw.rpc_sync, "w1", torch.neg, (x,))
        yield engine
        del kept


def gradients_of(sent: EdgeId) -> Gradients:
    headers, _ = encode_tensors([torch.ones(2)])
    crossing = Crossing(THEIRS, 1, to_wire(one(THEIRS)), [0])
    return Gradients(PASS, sent, [True], headers, [crossing])


def first_sent(engine) -> EdgeId:
    return next(iter(engine.edges.sent.values())).edge


def queued(engine) -> list[int]:
    return list(engine.edges.came_from(1).untold)


def test_when_the_pass_ends(w0):
    active = w0.passes.heard_of(PASS)
    w0.passes.settle(active, gradients_of(first_sent(w0)), None, 1)

    w0.passes.over(active)

    assert queued(w0) == [THEIRS.n]


def test_when_the_edge_that_they_settle_was_released_before(w0):
    """As happens when a pass fails: its graph dies on the other worker first."""
    sent, active = first_sent(w0), w0.passes.heard_of(PASS)
    w0.passes.settle(active, gradients_of(sent), None, 1)

    w0.edges.release([sent.n], 1)
    w0.passes.over(active)

    assert queued(w0) == [THEIRS.n]


def test_when_the_pass_ends_while_they_arrive(w0):
    active = w0.passes.heard_of(PASS)
    w0.passes.over(active)

    w0.passes.settle(active, gradients_of(first_sent(w0)), None, 1)

    assert queued(w0) == [THEIRS.n]
    assert not active.inbox


def test_when_they_come_twice(w0):
    active = w0.passes.heard_of(PASS)
    for _ in range(2):
        w0.passes.settle(active, gradients_of(first_sent(w0)), None, 1)

    assert active.error is not None
    assert queued(w0) == [THEIRS.n]


@pytest.mark.parametrize("why", ["over", "released", "limit"])
def test_when_they_come_with_a_start_that_does_not_run(w0, why, monkeypatch):
    sent = first_sent(w0)
    edges = to_wire(one(sent))
    start = Start(PASS, 1, None, edges, None, False, True, 5.0, gradients_of(sent))
    if why == "over":
        w0.passes.over(w0.passes.heard_of(PASS))
    elif why == "released":
        w0.edges.release([sent.n], 1)
    else:
        monkeypatch.setattr(w0._participant._runs, "_most", 0)
    channel = w0._agent._channels_to(1)[0]

    w0._participant._serve_start(start, None, Source(1, channel, 0))

    assert queued(w0) == [THEIRS.n]


def test_when_there_are_too_many_passes(w0, monkeypatch):
    monkeypatch.setattr(w0.passes, "_most", 0)
    source = Source(1, w0._agent._channels_to(1)[0], 0)

    with pytest.raises(OverLimit, match="passes"):
        w0._serve_gradients(gradients_of(first_sent(w0)), None, source)

    assert queued(w0) == [THEIRS.n]


@pytest.mark.parametrize("by", ["coordinator", "participant"])
def test_what_could_not_be_sent_leaves_no_edges(by, monkeypatch):
    def tell(to, message, *args, **kwargs):
        if isinstance(message, (Start, Gradients)):
            raise DeadlinePassed("it takes too long")
        return genuine(to, message, *args, **kwargs)

    def program():
        x = torch.ones(2, requires_grad=True)
        y = gw.rpc_sync("w1", torch.square, args=(x,))
        monkeypatch.setattr(agent, "tell", tell)
        with pytest.raises((GradwireError, DeadlinePassed)):
            torch.autograd.grad((y * y).sum(), x, create_graph=True)
        monkeypatch.setattr(agent, "tell", genuine)

    with cluster(2, options=Options(timeouts=Timeouts(backward=2))) as workers:
        agent = workers[0 if by == "coordinator" else 1].worker.agent
        genuine = agent.tell
        workers[0].run(program)
        assert_nothing_left(workers)


def test_a_call_that_is_refused_before_its_tensors_are_unpacked_releases_their_edges():
    def program():
        x = torch.ones(2, requires_grad=True)
        kept = gw.remote("w1", torch.neg, args=(x,))
        kept.to_here()
        refused = gw.remote("w1", torch.neg, args=(x * 2,))
        with pytest.raises((OverLimit, UsageError)):  # it may hear of the refusal later
            refused.to_here()

    with cluster(2, options=Options(limits=Limits(references=1))) as workers:
        workers[0].run(program)
        assert_nothing_left(workers)


def test_a_call_that_fails_before_its_tensors_are_unpacked_releases_their_edges(monkeypatch):
    def broken(*_args, **_kwargs):
        raise BadMessage("it does not decode")

    def program():
        monkeypatch.setattr(refs, "unpacking", broken)
        kept = gw.RRef(1)
        with pytest.raises(BadMessage, match="does not decode"):
            gw.rpc_sync("w1", pair, args=(torch.ones(2, requires_grad=True), kept))
        monkeypatch.undo()

    with cluster(2, expose=[pair]) as workers:
        refs = workers[1].worker.refs
        workers[0].run(program)
        edges = [member.worker.engine.edges for member in workers]
        assert eventually(lambda: not any(edge.sent or edge.received for edge in edges))


def test_gradients_that_do_not_decode_release_their_edges(monkeypatch):
    def broken(*_args, **_kwargs):
        raise BadMessage("it does not decode")

    def program():
        x = torch.ones(2, requires_grad=True)
        y = gw.rpc_sync("w1", torch.square, args=(x,))
        monkeypatch.setattr(workers[0].worker.engine, "_decode_gradients", broken)
        with pytest.raises(BadMessage, match="does not decode"):
            torch.autograd.grad((y * y).sum(), x, create_graph=True)
        monkeypatch.undo()

    with cluster(2) as workers:
        workers[0].run(program)
        assert_nothing_left(workers)


def test_gradients_that_do_not_encode_leave_no_edges(monkeypatch):
    def broken(*_args, **_kwargs):
        raise NotSerializable("it has no bytes")

    def program():
        x = torch.ones(2, requires_grad=True)
        y = gw.rpc_sync("w1", torch.square, args=(x,))
        monkeypatch.setattr(engine, "encode_tensors", broken)
        with pytest.raises(NotSerializable, match="no bytes"):
            torch.autograd.grad((y * y).sum(), x, create_graph=True)
        monkeypatch.undo()

    with cluster(2) as workers:
        workers[0].run(program)
        assert_nothing_left(workers)
