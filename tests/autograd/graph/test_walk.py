"""Walks, links and the order of waiting, on real graphs without workers."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from gradwire.autograd.graph import crossing
from gradwire.autograd.graph import walk as graph
from gradwire.autograd.graph.edges import Edges
from gradwire.autograd.graph.lineage import (
    by_worker,
    from_wire,
    numbers,
    plus,
    to_wire,
    union,
)
from gradwire.autograd.messages import Crossing
from gradwire.errors import BadMessage, ContextClosed, UsageError
from gradwire.ids import EdgeId
from gradwire.torch_private import sequence_number
from tests.autograd.tables import contexts_of


class NoWorker:
    """Nodes need a home to call in backward; here there is none."""


NO_WORKER = NoWorker()
HOME = weakref.ref(NO_WORKER)


@pytest.fixture
def edges():
    made = Edges(0, 0, 1000, threading.RLock())
    yield made
    made.clear()


def leave(edges, tensor, context=None):
    return crossing.leave(edges, HOME, context, 1, [0], [tensor], 0.0, None)


def arrive(edges, crossed, tensor=None, context=None):
    tensors = [torch.ones(2) if tensor is None else tensor]
    crossing.arrive(edges, HOME, context, 1, crossed, tensors)
    return tensors[0]


def answer_to(*crossings, n=0, worker=1):
    """What a peer sends back that depends on these."""
    edge = EdgeId(worker, n)
    depends = union([from_wire(crossed.lineage) for crossed in crossings])
    depth = max((c.depth for c in crossings), default=0) + 1
    return Crossing(edge, depth, to_wire(plus(depends, edge)), [0])


def depends_on(crossed):
    """The edges of a lineage, by worker."""
    lineage = from_wire(crossed.lineage)
    return {w: list(numbers(mine)) for w, mine in sorted(by_worker(lineage).items())}


def linked_sends(alive):
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


def test_a_tensor_of_ones_own_depends_on_nothing(edges):
    crossed = leave(edges, torch.ones(2, requires_grad=True) * 2)

    assert crossed.depth == 1
    assert depends_on(crossed) == {0: [0]}


def test_lineage_goes_through_what_was_received(edges):
    first = leave(edges, torch.ones(2, requires_grad=True))
    back = arrive(edges, answer_to(first))
    second = leave(edges, (back * 2).sin())

    assert second.depth == 3
    assert depends_on(second) == {0: [0, 1], 1: [0]}


def test_a_recv_hangs_on_exactly_the_sends_of_its_lineage(edges):
    x = torch.ones(2, requires_grad=True)
    sent = [leave(edges, x * n) for n in range(6)]
    one = arrive(edges, answer_to(sent[0], sent[2], sent[5], n=0))
    other = arrive(edges, answer_to(sent[1], n=1))
    more = arrive(edges, answer_to(sent[0], sent[2], sent[5], sent[3], n=2))

    assert linked_sends(one) == {0, 2, 5}
    assert linked_sends(other) == {1}
    assert linked_sends(more) == {0, 2, 3, 5}


def test_a_recurrent_state_on_a_peer_costs_one_link_per_step(edges):
    x, crossings = torch.ones(2, requires_grad=True), []
    for step in range(50):
        crossings.append(leave(edges, x * step))
        alive = arrive(edges, answer_to(*crossings, n=step))
        links = [n for n, _ in alive.grad_fn.next_functions if n is not None]
        assert len(links) == 2  # the anchor's accumulator, and one link
    assert linked_sends(alive) == set(range(50))
    assert all(len(join.token.grad_fn.next_functions) == 2 for join in edges.joins)


def test_a_send_that_implies_the_others_is_the_only_link(edges):
    value = torch.ones(2, requires_grad=True)
    for step in range(5):
        crossed = leave(edges, value)
        value = arrive(edges, answer_to(crossed, n=step))

    assert edges.joins == []


def test_sends_are_numbered_by_depth_and_everything_else_is_lifted_above_it(edges):
    value = torch.ones(2, requires_grad=True)
    for step in range(30):
        value = arrive(edges, answer_to(leave(edges, value), n=step))
    slow = value.detach().requires_grad_()  # a leaf made here
    mixed = (slow * value).sum()
    crossed = leave(edges, mixed)
    sent = edges.sent[crossed.edge.n]

    assert sequence_number(sent.node) == crossed.depth == 61
    assert sequence_number(mixed.grad_fn) > 60
    assert sequence_number(value.grad_fn) > 60


def test_each_node_is_visited_once(edges, monkeypatch):
    visited = []
    monkeypatch.setattr(graph, "lift", lambda node, depth: visited.append(node))
    value = torch.ones(2, requires_grad=True)
    for _ in range(20):
        value = value * 2
        leave(edges, value)

    assert len(set(visited)) == len(visited) == 20


def test_a_deep_graph_does_not_overflow(edges):
    value = torch.ones((), requires_grad=True)
    for _ in range(20_000):
        value = value + 1

    assert leave(edges, value).depth == 1


def test_a_lineage_with_edges_that_never_left_is_refused(edges):
    crossed = answer_to(*[answer_to(n=n, worker=0) for n in range(8)])

    with pytest.raises(BadMessage, match="edges of worker 0 that never left it"):
        arrive(edges, crossed)


def test_what_was_withdrawn_is_not_sent_and_its_number_not_used_again(edges):
    crossed = leave(edges, torch.ones(2, requires_grad=True))
    edges.withdraw([crossed.edge])

    assert edges.sent == {}
    assert leave(edges, torch.ones(2, requires_grad=True)).edge == EdgeId(0, 1)


def test_contexts_are_no_boundary(edges):
    """Edges of two contexts and of none are in one lineage."""
    kept = arrive(edges, answer_to(), context=5)
    second = arrive(edges, answer_to(leave(edges, kept * 2, context=6), n=1))

    assert depends_on(leave(edges, second)) == {0: [0, 1], 1: [0, 1]}


def test_what_a_walk_has_found_is_kept_by_the_nodes_themselves_and_dies_with_them(edges):
    received = arrive(edges, answer_to())
    made = received * 2
    leave(edges, made)
    node = weakref.ref(received.grad_fn)

    assert made.grad_fn.metadata["gradwire"] == node().metadata["gradwire"]
    del received, made
    assert edges.received[EdgeId(1, 0)]() is not None  # the Send that is left holds it
    edges.release([0], by=1)
    assert node() is None


def test_a_closed_context_is_not_heard_of_again():
    contexts = contexts_of(1)
    foreign = 5
    assert contexts.heard_of(foreign) is not None
    contexts.close(foreign)

    assert contexts.heard_of(foreign) is None
    with pytest.raises(ContextClosed, match=r"c0\.5 is closed on w1"):
        contexts.find(foreign)
    with pytest.raises(UsageError, match="Could not find autograd context with id: 77"):
        contexts.find(77)


def test_a_context_of_ones_own_that_was_never_opened_is_not_made_by_a_message():
    assert contexts_of(0).heard_of(3) is None


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_new_thread_is_lifted_exactly_above_a_depth(mode):
    found = []

    def work():
        with mode():
            for depth in (0, 1, 700, 300, 701):
                graph.lift_this_thread(depth)
        made = [(torch.ones((), requires_grad=True) * 2).grad_fn for _ in range(2)]
        found.extend(map(sequence_number, made))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert found == [702, 703]
