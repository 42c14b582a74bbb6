"""What was refused is counted, by kind, and told once."""

from __future__ import annotations

import logging
import sys

import pytest

import gradwire
from gradwire.agent.peers.refusals import Refusals
from gradwire.current import current_worker
from gradwire.errors import NotExposed, OverLimit, PeerLost
from gradwire.options import Limits, Options
from gradwire.testing import cluster
from gradwire.wire.message import Frame
from tests.leftovers import eventually
from tests.transport.conformance import recv

HERE = sys.modules[__name__]


def hidden(x):
    return x


@gradwire.expose
def shown(x):
    return x


@gradwire.expose
def asks_further():
    return gradwire.rpc_sync("w2", hidden, (1,))


def ask(to, function, *args):
    with pytest.raises(NotExposed, match="hidden is not exposed on this worker"):
        gradwire.rpc_sync(to, function, args)


def test_a_refused_function_is_counted_each_time_and_logged_once_for_each_peer(caplog):
    with cluster(3) as workers, caplog.at_level(logging.WARNING, "gradwire"):
        for caller in (0, 0, 2, 2, 2):
            workers[caller].run(ask, "w1", hidden, 1)
        assert workers[1].run(gradwire.refusals) == {"not exposed": 5}
        assert workers[0].run(gradwire.refusals) == {}
    told = [line for line in caplog.messages if " refused " in line]
    assert [line.split(":")[0] for line in told] == ["w1 refused w0", "w1 refused w2"]
    assert "tests.security.test_refusals:hidden is not exposed on this worker" in told[0]
    assert "the next are only counted" in told[0]


def test_the_counts_of_a_worker_can_be_read_after_its_shutdown(tmp_path):
    options = Options(listen="unix", init_method=f"file://{tmp_path}/meeting")
    gradwire.init_rpc("w0", 0, None, options)
    current_worker.find().refusals.count("late", "w1")
    before = gradwire.refusals()
    gradwire.shutdown()

    assert gradwire.refusals() == before == {"late": 1}


def test_a_reference_that_was_refused_is_counted_too():
    with cluster(2) as workers:
        reference = workers[0].run(gradwire.remote, "w1", hidden, (1,))
        with pytest.raises(NotExposed):
            workers[0].run(reference.to_here)
        assert workers[1].run(gradwire.refusals) == {"not exposed": 1}


def test_what_another_worker_refused_is_not_counted_here():
    with cluster(3) as workers:
        workers[0].run(ask, "w1", asks_further)
        assert workers[1].run(gradwire.refusals) == {}
        assert workers[2].run(gradwire.refusals) == {"not exposed": 1}


def test_what_is_over_a_limit_is_counted():
    with cluster(2, expose=[HERE], options=Options(limits=Limits(depth=4))) as workers:
        sender = workers[0].worker.calls._bodies._codec
        sender._limits = Limits(depth=10)  # a peer with other ideas
        with pytest.raises(OverLimit, match="nested deeper than the limit"):
            workers[0].run(gradwire.rpc_sync, "w1", shown, ([[[[[1]]]]],))
        assert workers[1].run(gradwire.refusals) == {"over limit": 1}


def test_a_frame_that_no_peer_sends_is_counted_and_ends_the_connection(caplog):
    with cluster(2, expose=[HERE]) as workers:
        agent = workers[0].worker.agent
        channel = agent._connections.to(1, agent.clock.now() + 5)
        channel.send(Frame(0x7777, 0, 1, b"\xc0", ()), agent.clock.now() + 5)
        assert eventually(lambda: workers[1].run(gradwire.refusals) == {"bad message": 1})
        assert eventually(lambda: "no handler for messages of kind" in caplog.text)
        with pytest.raises(PeerLost):
            recv(channel)


def test_strangers_cannot_fill_the_memory_of_refusals():
    refusals = Refusals()
    first = [refusals.count("slow", f"peer {n}") for n in range(100_000)]
    assert first[:1000] == [True] * 1000
    assert not first[-1]
    assert len(refusals._logged) < 10_000
    assert refusals.seen() == {"slow": 100_000}
