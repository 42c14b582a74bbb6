"""A reference whose value went with the connection of its maker: its holder soon hears of it."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import pytest

import gradwire as gw
from gradwire.errors import PeerLost, UsageError
from gradwire.rpc.messages import QueryFork
from gradwire.rpc.refs.handles_state import Verdict
from gradwire.testing import cluster
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]
LONG = 60.0
"""much longer than the tests take"""


@pytest.fixture
def workers():
    with cluster(3, expose=[HERE]) as made:
        yield made
        assert_nothing_left(made)


def same(value):
    return value


def fetched(reference):
    return reference.to_here(timeout=LONG)


def refs(member):
    return member.worker.refs


def cut(one, other):
    """What both are told when their connection ends, and when there is another."""
    for near, far in ((one, other), (other, one)):
        peer = far.worker.agent.directory.me.id
        refs(near)._peer_lost(peer, PeerLost("cut"))
        refs(near)._peer_joined(peer)


def question(member, to, fork):
    """What one worker answers another about a fork."""
    agent = member.worker.agent
    deadline = agent.clock.now() + LONG
    _, answer = agent.request(to, QueryFork(fork), deadline=deadline, description="a question")
    return answer.wait(LONG).message.verdict


@contextmanager
def fetching_before_it_is_there(workers, monkeypatch):
    """A reference that w0 made on w1, and what w2 fetches by it: w1 does not know it meanwhile."""
    reference = workers[0].run(gw.remote, "w1", same, args=(1,))
    assert eventually(reference.confirmed_by_owner)  # nothing of it comes after a loss
    with monkeypatch.context() as patch:
        patch.setattr(refs(workers[1])._table.owned, "fork_arrived", lambda *_: Verdict.NOT_YET)
        answer = workers[0].run(gw.rpc_async, "w2", fetched, args=(reference,), timeout=LONG)
        assert eventually(lambda: refs(workers[2]).statistics().pending_users == 1)
        yield reference, answer


def test_who_waits_for_a_value_that_went_with_a_connection_hears_of_it(workers, monkeypatch):
    with fetching_before_it_is_there(workers, monkeypatch) as (reference, answer):
        cut(workers[0], workers[1])
    assert eventually(answer.done)

    with pytest.raises(UsageError, match=f"{reference.handle.ref} is not kept on w1 any more"):
        answer.wait()


def test_a_maker_that_still_expects_the_value_says_so_to_nobody_but_its_taker(workers, monkeypatch):
    with fetching_before_it_is_there(workers, monkeypatch) as (_, answer):
        (fork,) = refs(workers[0])._table._children
        said = [question(workers[n], 0, fork) for n in (1, 2)]
        assert not answer.done()

    assert said == ["never", "not yet"]
    assert answer.wait() == 1
