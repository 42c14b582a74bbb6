"""The edges of one worker: who releases them, when, and what goes with them. Without workers."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gradwire.autograd.graph import crossing
from gradwire.autograd.graph.crossing import _JOINS_KEPT
from gradwire.autograd.graph.edges import Edges
from gradwire.autograd.graph.lineage import from_wire, plus, to_wire, union
from gradwire.autograd.graph.walk import ROOM
from gradwire.autograd.messages import Crossing
from gradwire.errors import BadMessage, OverLimit
from gradwire.ids import EdgeId

MOST = 50


class NoWorker:
    """Nodes need a home to call in backward; here there is none."""


NO_WORKER = NoWorker()
HOME = weakref.ref(NO_WORKER)


@pytest.fixture
def edges():
    made = Edges(0, 0, MOST, threading.RLock())
    yield made
    made.clear()


def leave(edges, tensor, peer=1):
    return crossing.leave(edges, HOME, None, peer, [0], [tensor], 0.0, None)


def answer_to(*crossings, n=0, worker=1):
    """What a peer sends back that depends on these."""
    edge = EdgeId(worker, n)
    depends = union([from_wire(crossed.lineage) for crossed in crossings])
    depth = max((crossed.depth for crossed in crossings), default=0) + 1
    return Crossing(edge, depth, to_wire(plus(depends, edge)), [0])


def arrive(edges, crossed):
    tensors = [torch.ones(2)]
    crossing.arrive(edges, HOME, None, crossed.edge.worker, crossed, tensors)
    return tensors[0]


def leaf():
    return torch.ones(2, requires_grad=True)


# -- the end of a Recv


def taken(edges):
    """What there is to release, by sender, as if all were told at once."""
    found = {sender: edges.to_release(sender, 100) for sender in edges.to_tell}
    for sender, numbers in found.items():
        edges.was_told(sender, numbers)
    return found


def test_a_recv_that_dies_releases_its_edge_once(edges):
    received = arrive(edges, answer_to(n=7))
    assert not edges.to_tell
    made = received * 2
    del received
    assert taken(edges) == {}  # what was made of it holds it

    del made
    assert edges.to_tell == [1]
    assert taken(edges) == {1: [7]}
    assert taken(edges) == {}
    assert edges.received == {}


def test_who_drops_a_message_releases_no_edge_of_others_and_none_that_is_alive(edges):
    """The sender of a message that is dropped unread may have named any edges in it."""
    kept = arrive(edges, answer_to(n=7, worker=1))
    edges.unseen([EdgeId(1, 7), EdgeId(1, 8), EdgeId(2, 5)], 1)

    assert taken(edges) == {1: [8]}
    del kept
    assert taken(edges) == {1: [7]}


def test_dead_edges_are_sorted_by_their_sender(edges):
    kept = [arrive(edges, answer_to(n=n, worker=w)) for w, n in ((1, 3), (2, 3), (1, 4), (2, 9))]
    edges.unseen([EdgeId(2, 5)], 2)
    del kept

    assert {w: sorted(ns) for w, ns in taken(edges).items()} == {1: [3, 4], 2: [3, 5, 9]}


@pytest.fixture
def often():
    """Threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("often")
def test_threads_that_tell_of_dead_edges_at_once_miss_none(edges):
    """The tick of the timer does, and every call and answer. Twice does no harm."""
    rounds, count = 300, 4
    all_are_here = threading.Barrier(count)

    def take(number):
        told = []
        for n in range(rounds):
            if number == 0:
                arrive(edges, answer_to(n=n))
                edges.unseen([EdgeId(1, rounds + n)], 1)
            all_are_here.wait(30)
            told += taken(edges).get(1, [])
            all_are_here.wait(30)
        return told

    with ThreadPoolExecutor(count) as threads:
        told = {n for part in threads.map(take, range(count)) for n in part}

    assert told == set(range(2 * rounds))
    assert not edges.to_tell
    assert not edges.received


# -- the word of the receiver


def test_an_edge_is_released_by_its_receiver_only(edges):
    mine, theirs = leave(edges, leaf(), peer=1), leave(edges, leaf(), peer=2)

    with pytest.raises(BadMessage, match=r"w2 releases e0\.0, which leads to another worker"):
        edges.release([theirs.edge.n, mine.edge.n], by=2)
    assert sorted(edges.sent) == [0, 1]  # a message that is refused releases nothing
    assert len(edges.release([0], by=1)) == 1
    assert sorted(edges.sent) == [1]


def test_a_release_may_be_repeated_and_what_never_left_is_refused(edges):
    leave(edges, leaf())
    assert len(edges.release([0], by=1)) == 1

    assert edges.release([0], by=1) == []
    assert edges.release([0], by=2) == []  # whose it was is forgotten with it
    with pytest.raises(BadMessage, match="w1 releases edge 1, which never left here"):
        edges.release([1], by=1)


def test_what_is_released_dies_where_it_is_dropped_and_the_recvs_behind_it_follow(edges):
    back = arrive(edges, answer_to(leave(edges, leaf())))
    tensor = back * 3
    held = weakref.ref(tensor)
    onward = leave(edges, tensor, peer=2)
    del tensor, back
    assert taken(edges) == {}

    dropped = edges.release([onward.edge.n], by=2)
    assert taken(edges) == {}
    dropped.clear()
    assert held() is None
    assert taken(edges) == {1: [0]}


def test_an_edge_whose_message_did_not_leave_is_withdrawn(edges):
    crossed = leave(edges, leaf())
    edges.withdraw([crossed.edge])

    assert edges.sent == {}
    edges.withdraw([crossed.edge])
    assert leave(edges, leaf()).edge.n == 1  # its number is not used again
    assert edges.release([0], by=1) == []


# -- ends that do not wait for the Recv


def test_the_end_of_a_context_releases_what_is_alive_and_only_what_it_names(edges):
    sent = [leave(edges, leaf()) for _ in range(3)]
    kept = [arrive(edges, answer_to(n=n)) for n in range(3)]
    edges.release([1], by=1)

    edges.release_early([0, 1], [EdgeId(1, 0), EdgeId(1, 2), EdgeId(1, 9)])
    assert sorted(edges.sent) == [sent[2].edge.n]
    assert sorted(edges.received) == [EdgeId(1, 1)]
    assert taken(edges) == {1: [0, 2]}
    kept.clear()
    assert taken(edges) == {1: [1]}  # not again those that were released early


def test_with_a_peer_goes_what_it_received_and_what_it_sent(edges):
    leave(edges, leaf(), peer=1), leave(edges, leaf(), peer=2)
    kept = [arrive(edges, answer_to(n=n, worker=w)) for w, n in ((1, 0), (2, 0))]

    assert len(edges.peer_lost(1)) == 1
    assert [sent.peer for sent in edges.sent.values()] == [2]
    assert sorted(edges.received) == [EdgeId(2, 0)]
    kept.clear()
    assert taken(edges) == {2: [0]}  # nobody is told about the lost one's
    assert edges.peer_lost(1) == []


def test_at_shutdown_nothing_stays(edges):
    leave(edges, leaf())
    kept = arrive(edges, answer_to())
    assert len(edges.clear()) == 1

    assert (edges.sent, edges.received, edges.joins) == ({}, {}, [])
    del kept
    assert taken(edges) == {}


# -- links


def joined(edges, count):
    """One Recv each that depends on one more send than the one before."""
    sent, kept = [], []
    for step in range(count):
        sent.append(leave(edges, leaf()))
        kept.append(arrive(edges, answer_to(*sent, n=step)))
    return kept


def test_a_join_goes_with_the_first_of_its_edges_that_is_released(edges):
    kept = joined(edges, 4)
    assert len(edges.joins) == 3
    tokens = [weakref.ref(join.token) for join in edges.joins]
    kept.clear()
    taken(edges)

    edges.release([2], by=1).clear()
    assert len(edges.joins) == 1  # that of the first two edges
    edges.release([0], by=1).clear()
    assert edges.joins == []
    edges.release([1, 3], by=1).clear()
    gc.collect()
    assert [token() for token in tokens] == [None] * 3


def test_joins_that_later_links_may_build_on_are_few(edges):
    kept = joined(edges, _JOINS_KEPT + 10)

    assert len(edges.joins) == _JOINS_KEPT == 32
    del kept


# -- depth


def test_depth_goes_back_to_0_when_nothing_is_alive(edges):
    depths = [leave(edges, leaf()).depth for _ in range(5)]
    assert depths == [1, 2, 3, 4, 5]
    edges.release(range(4), by=1)
    assert leave(edges, leaf()).depth == 6

    edges.release([4, 5], by=1)
    assert leave(edges, leaf()).depth == 1


def test_depth_begins_anew_with_each_pass(edges):
    before = leave(edges, leaf())
    edges.latest_depth = 0  # as at the end of a pass

    assert leave(edges, leaf()).depth == 1
    assert edges.next_depth(before.depth) == 2  # what depends on an edge is deeper, always


def test_edges_that_do_not_depend_on_each_other_get_no_deeper_than_half_the_room(edges):
    for n in range(ROOM):
        depth = leave(edges, leaf()).depth
        if n >= 10:
            edges.release([n - 5], by=1)

    assert depth == ROOM // 2 + 1
    assert edges.next_depth(ROOM) == ROOM + 1  # what depends on an edge is deeper, always


# -- the quota


def test_the_quota_counts_edges_of_one_sender_that_are_alive(edges):
    kept = [arrive(edges, answer_to(n=n)) for n in range(MOST)]
    with pytest.raises(OverLimit, match=f"{MOST} edges open here already"):
        arrive(edges, answer_to(n=MOST))
    assert len(edges.received) == MOST
    other = arrive(edges, answer_to(n=0, worker=2))

    del kept[10:20]
    taken(edges)
    kept += [arrive(edges, answer_to(n=n)) for n in range(MOST + 1, MOST + 11)]
    assert len(edges.received) == MOST + 1
    del kept, other
    taken(edges)
    assert edges.received == {}


@pytest.mark.parametrize("end", ["early", "lost"])
def test_every_end_of_an_edge_gives_its_place_back_once(edges, end):
    kept = [arrive(edges, answer_to(n=n)) for n in range(3)]
    if end == "early":
        edges.release_early([], list(edges.received))
    else:
        edges.peer_lost(1)
    assert edges.received == {}
    kept.clear()
    taken(edges)
    assert edges.received == {}
    assert arrive(edges, answer_to(n=9)).requires_grad
