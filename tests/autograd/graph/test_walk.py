"""Walks, links and the order of waiting, on real graphs without workers."""

from __future__ import annotations

import weakref

import pytest
import torch

from gradwire.autograd.graph import crossing
from gradwire.autograd.graph import walk as graph
from gradwire.autograd.graph.context import Contexts
from gradwire.autograd.graph.walk import from_wire
from gradwire.autograd.messages import Crossing
from gradwire.errors import BadMessage, ContextClosed, UsageError
from gradwire.ids import EdgeId
from gradwire.torch_private import sequence_number


class NoWorker:
    """Nodes need a home to call in backward; here there is none."""


NO_WORKER = NoWorker()
HOME = weakref.ref(NO_WORKER)


@pytest.fixture
def context():
    return Contexts(0, "w0").new()


def leave(context, tensor):
    return crossing.leave(context, HOME, 0, 1, [0], [tensor])


def arrive(context, crossed, tensor=None):
    tensors = [torch.ones(2) if tensor is None else tensor]
    crossing.arrive(context, HOME, 0, 1, crossed, tensors)
    return tensors[0]


def answer_to(*crossings, n=0, worker=1):
    """What a peer sends back that depends on these."""
    lineage = {worker: 1 << n}
    for crossed in crossings:
        for w, bits in from_wire(crossed.lineage).items():
            lineage[w] = lineage.get(w, 0) | bits
    depth = max((c.depth for c in crossings), default=0) + 1
    wire = {w: b.to_bytes((b.bit_length() + 7) // 8, "little") for w, b in lineage.items()}
    return Crossing(EdgeId(worker, n), depth, wire, [0])


def linked_sends(context, alive):
    """The edges of this worker that a Recv hangs on, through Joins."""
    todo, found, seen = [alive.grad_fn], set(), set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::distributed::autograd::SendRpcBackward":
            found.add(node.end.edge.n)
        else:
            todo += [n for n, _ in node.next_functions if n is not None]
    return found


def test_a_tensor_of_ones_own_depends_on_nothing(context):
    crossed = leave(context, torch.ones(2, requires_grad=True) * 2)

    assert crossed.depth == 1
    assert from_wire(crossed.lineage) == {0: 1}


def test_lineage_goes_through_what_was_received(context):
    first = leave(context, torch.ones(2, requires_grad=True))
    back = arrive(context, answer_to(first))
    second = leave(context, (back * 2).sin())

    assert second.depth == 3
    assert from_wire(second.lineage) == {0: 0b11, 1: 1}


def test_a_recv_hangs_on_exactly_the_sends_of_its_lineage(context):
    x = torch.ones(2, requires_grad=True)
    sent = [leave(context, x * n) for n in range(6)]
    one = arrive(context, answer_to(sent[0], sent[2], sent[5], n=0))
    other = arrive(context, answer_to(sent[1], n=1))
    more = arrive(context, answer_to(sent[0], sent[2], sent[5], sent[3], n=2))

    assert linked_sends(context, one) == {0, 2, 5}
    assert linked_sends(context, other) == {1}
    assert linked_sends(context, more) == {0, 2, 3, 5}


def test_a_recurrent_state_on_a_peer_costs_one_link_per_step(context):
    x, crossings = torch.ones(2, requires_grad=True), []
    for step in range(50):
        crossings.append(leave(context, x * step))
        alive = arrive(context, answer_to(*crossings, n=step))
        links = [n for n, _ in alive.grad_fn.next_functions if n is not None]
        assert len(links) == 2  # the anchor's accumulator, and one link
    assert linked_sends(context, alive) == set(range(50))
    assert all(len(join.token.grad_fn.next_functions) == 2 for join in context.joins)


def test_a_send_that_implies_the_others_is_the_only_link(context):
    value = torch.ones(2, requires_grad=True)
    for step in range(5):
        crossed = leave(context, value)
        value = arrive(context, answer_to(crossed, n=step))

    assert context.joins == []


def test_sends_are_numbered_by_depth_and_everything_else_is_lifted_above_it(context):
    value = torch.ones(2, requires_grad=True)
    for step in range(30):
        value = arrive(context, answer_to(leave(context, value), n=step))
    slow = value.detach().requires_grad_()  # a leaf made here
    mixed = (slow * value).sum()
    crossed = leave(context, mixed)
    sent = context.sent[-1]

    assert sequence_number(sent.node) == crossed.depth == 61
    assert sequence_number(mixed.grad_fn) > 60
    assert sequence_number(value.grad_fn) > 60


def test_each_node_is_visited_once_per_context(context, monkeypatch):
    visited = []
    monkeypatch.setattr(graph, "lift", lambda node, depth: visited.append(node))
    value = torch.ones(2, requires_grad=True)
    for _ in range(20):
        value = value * 2
        leave(context, value)

    assert len(set(visited)) == len(visited) == 20


def test_a_deep_graph_does_not_overflow(context):
    value = torch.ones((), requires_grad=True)
    for _ in range(20_000):
        value = value + 1

    assert leave(context, value).depth == 1


def test_a_lineage_with_edges_that_never_left_is_refused(context):
    crossed = Crossing(EdgeId(1, 0), 2, {0: b"\xff", 1: b"\x01"}, [0])

    with pytest.raises(BadMessage, match="edges of worker 0 that never left it"):
        arrive(context, crossed)


def test_what_was_withdrawn_is_not_sent_and_its_number_not_used_again(context):
    crossed = leave(context, torch.ones(2, requires_grad=True))
    context.sent[crossed.edge.n] = None  # withdrawn

    assert context.sent == [None]
    assert leave(context, torch.ones(2, requires_grad=True)).edge == EdgeId(0, 1)


def test_a_recv_of_another_context_is_a_boundary():
    contexts = Contexts(0, "w0")
    old, new = contexts.new(), contexts.new()
    kept = arrive(old, answer_to())

    assert from_wire(leave(new, kept * 2).lineage) == {0: 1}


def test_a_closed_context_is_not_heard_of_again():
    contexts = Contexts(1, "w1")
    foreign = 5
    assert contexts.heard_of(foreign) is not None
    contexts.close(foreign)

    assert contexts.heard_of(foreign) is None
    with pytest.raises(ContextClosed, match=r"c0\.5 is closed on w1"):
        contexts.find(foreign)
    with pytest.raises(UsageError, match="Could not find autograd context with id: 77"):
        contexts.find(77)


def test_a_context_of_ones_own_that_was_never_opened_is_not_made_by_a_message():
    assert Contexts(0, "w0").heard_of(3) is None
