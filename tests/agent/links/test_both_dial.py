"""Two workers that dial each other at once: both send by the channel of the lower one."""

from __future__ import annotations

import threading

import pytest
import torch

import gradwire
import gradwire.testing
from gradwire.agent.links import connections, handshake
from gradwire.agent.links.connections import Connections
from gradwire.transport.address import Transports

SECONDS = 10.0


def call_each_other(workers):
    x = torch.ones(2)
    calls = [
        threading.Thread(target=worker.run, args=(gradwire.rpc_sync, name, torch.neg, (x,)))
        for worker, name in ((workers[0], "w1"), (workers[1], "w0"))
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join(SECONDS)


def channels_of(worker, peer):
    return worker.worker.agent._connections.channels[peer]


def accepts():
    """Whether this thread completes a connection that was accepted."""
    return "handshake" in threading.current_thread().name


@pytest.fixture
def crossing(monkeypatch):  # noqa: C901  (its small functions are one interleaving)
    """Both dial at once, and each completes what it has dialled before what it has accepted."""
    both, said = threading.Barrier(2), threading.Event()
    is_through = threading.Event(), threading.Event()
    """the channel that was dialled is in use on w0, and about to be on w1"""
    connect, use, check = Transports.connect, Connections._use, handshake.check_hello
    say, hear = Connections._send_hello, Connections._receive_hello

    def connect_together(self, *args):
        both.wait(SECONDS)
        return connect(self, *args)

    def use_and_tell(self, *args):
        found = use(self, *args)
        if self._directory.me.id == 0 and not accepts():
            is_through[0].set()
        return found

    def check_and_tell(*args, dialled):
        if dialled == 0:
            is_through[1].set()
        return check(*args, dialled=dialled)

    def hear_late(self, *args, **kwargs):
        heard = hear(self, *args, **kwargs)
        if self._directory.me.id == 1 and accepts():
            assert said.wait(SECONDS)
        return heard

    def say_and_linger(self, *args):
        losses = say(self, *args)
        if accepts():
            assert is_through[self._directory.me.id].wait(SECONDS)
        elif self._directory.me.id == 1:
            said.set()
        return losses

    monkeypatch.setattr(connections, "_BOTH_DIAL_SECONDS", SECONDS)
    monkeypatch.setattr(Transports, "connect", connect_together)
    monkeypatch.setattr(Connections, "_use", use_and_tell)
    monkeypatch.setattr(Connections, "_send_hello", say_and_linger)
    monkeypatch.setattr(Connections, "_receive_hello", hear_late)
    monkeypatch.setattr(handshake, "check_hello", check_and_tell)


@pytest.mark.usefixtures("crossing")
def test_both_send_by_the_same_channel():
    x = torch.ones(2)
    with gradwire.testing.cluster(2) as workers:
        call_each_other(workers)
        ours, theirs = channels_of(workers[0], 1), channels_of(workers[1], 0)
        before = ours[0].frames_received, theirs[0].frames_received
        for _ in range(5):
            workers[0].run(gradwire.rpc_sync, "w1", torch.neg, (x,))
            workers[1].run(gradwire.rpc_sync, "w0", torch.neg, (x,))

        assert len(ours) == len(theirs) == 2
        assert ours[0].frames_received >= before[0] + 10  # five requests, five answers
        assert theirs[0].frames_received >= before[1] + 10


@pytest.mark.parametrize("me", [0, 1])
def test_one_that_connects_late_uses_what_the_other_has_dialled(monkeypatch, me):
    """It does not wait for our connection, which may take long or fail."""
    reached, connect, x = threading.Event(), Transports.connect, torch.ones(2)

    def connect_late(self, address, *args):
        if address == f"memory://w{1 - me}":
            assert reached.wait(SECONDS)
        return connect(self, address, *args)

    monkeypatch.setattr(Transports, "connect", connect_late)
    with gradwire.testing.cluster(2) as workers:
        late, other = workers[me], workers[1 - me]
        mine = threading.Thread(
            target=late.run, args=(gradwire.rpc_sync, other.name, torch.neg, (x,))
        )
        mine.start()
        answer = other.run(gradwire.rpc_sync, late.name, torch.neg, args=(x,), timeout=0.4)
        reached.set()
        mine.join(SECONDS)

        assert torch.equal(answer, -x)
        assert len(channels_of(late, 1 - me)) == 1
