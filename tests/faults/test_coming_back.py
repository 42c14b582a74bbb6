"""A worker that was lost and is back: what was before does not meet what comes after."""

from __future__ import annotations

import sys
import threading
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

import gradwire
from gradwire import DeadlinePassed, PeerLost, UsageError
from gradwire.agent.membership.shutdown_state import OVER, QUIET
from gradwire.agent.messages import Done
from gradwire.testing import cluster
from tests.gates import GATES
from tests.injection.proxy import redirect
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]
WEIGHTS: list[torch.Tensor] = []


@pytest.fixture
def workers():
    with cluster(2, expose=[HERE]) as made:
        yield made
        assert_nothing_left(made)


def doubled(x):
    return x * 2


def _cut(workers):
    """Both notice."""
    for near, far in ((0, 1), (1, 0)):
        workers[near].worker.agent.hang_up(far, "a test has cut it")


def test_one_that_has_not_noticed_hears_by_the_next_greeting_that_it_was_lost(workers):
    assert workers[0].run(gradwire.rpc_sync, "w1", doubled, args=(2,)) == 4
    lost = []
    workers[1].worker.agent.on_peer_lost(lambda worker, error: lost.append(str(error)))
    connections = workers[0].worker.agent._connections
    with connections._lock:  # given up here, and not a word of it on the wire
        given_up = connections.channels.pop(1)
        connections._losses[1] += 1
    (link,) = [c.remote for c in workers[1].worker.agent._connections.channels[0]]

    assert workers[0].run(gradwire.rpc_sync, "w1", doubled, args=(2,)) == 4
    assert lost == [f"w0 was lost: w0 has ended its connections with us [{link}]"]
    given_up[0].close()


def test_a_loss_is_told_before_the_next_connection_is_used(workers):
    """Whoever listens takes its time; a call waits until all have heard."""
    gate, told = threading.Event(), []
    assert workers[0].run(gradwire.rpc_sync, "w1", doubled, args=(2,)) == 4

    def listen(worker, error):
        assert gate.wait(30)
        told.append(worker)

    workers[1].worker.agent.on_peer_lost(listen)
    with ThreadPoolExecutor(3) as pool:
        pool.submit(workers[1].worker.agent.hang_up, 0, "a test has cut it")
        assert eventually(lambda: not workers[1].worker.agent.is_connected(0))
        call = pool.submit(workers[1].run, gradwire.rpc_sync, "w0", doubled, args=(3,))
        with pytest.raises(futures.TimeoutError):
            call.result(0.2)
        assert told == []
        gate.set()
        assert call.result(30) == 6

    assert told == [0]


def test_one_that_waits_for_the_others_to_leave_goes_on_while_they_can_be_reached(workers):
    assert workers[0].run(gradwire.rpc_sync, "w1", doubled, args=(2,)) == 4
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(workers[1].worker.shutdown, graceful=True)
        progress = workers[0].worker._graceful_shutdown._progress
        assert eventually(lambda: progress.has_reached(1, 1))
        _cut(workers)

        assert eventually(lambda: workers[1].worker.agent.is_connected(0))
        assert workers[0].run(gradwire.rpc_sync, "w1", doubled, args=(2,)) == 4
        assert not leaving.done()
        workers[0].worker.shutdown(graceful=True)
        leaving.result(30)


def test_one_that_is_taken_for_gone_and_connects_again_is_waited_for():
    with ThreadPoolExecutor(2) as pool, cluster(3, expose=[HERE]) as workers:
        assert workers[0].run(gradwire.rpc_sync, "w1", doubled, args=(2,)) == 4
        leaving = [pool.submit(workers[1].worker.shutdown, graceful=True)]
        progress = workers[1].worker._graceful_shutdown._progress
        assert eventually(lambda: workers[0].worker._graceful_shutdown._progress.has_reached(1, 1))
        channels = workers[0].worker.agent._connections.channels
        (before,) = channels[1]
        workers[1].run(redirect, "w0", "memory://nowhere")
        assert eventually(lambda: progress.missing(1) == [2]), "nobody listens there"
        assert eventually(lambda: before not in channels.get(1, ())), "it has noticed the cut"

        assert workers[0].run(gradwire.rpc_sync, "w1", doubled, args=(2,)) == 4
        leaving.append(pool.submit(workers[2].worker.shutdown, graceful=True))
        assert eventually(lambda: progress.missing(1) == [0])
        assert workers[0].run(gradwire.rpc_sync, "w1", doubled, args=(2,)) == 4
        assert workers[0].worker.shutdown(graceful=True) == []
        assert [one.result(30) for one in leaving] == [[], []]


def test_one_that_is_closed_by_another_thread_waits_for_nobody(workers):
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(workers[1].worker.shutdown, graceful=True)
        assert eventually(lambda: workers[0].worker._graceful_shutdown._progress.has_reached(1, 1))
        workers[1].worker.close()

        assert leaving.result(30) == []


def test_one_that_cannot_tell_a_peer_ends_its_tries_when_it_is_closed(workers, caplog):
    shutdown = workers[1].worker._graceful_shutdown
    tried = threading.Event()

    def too_late(*_):
        tried.set()
        raise DeadlinePassed("a test lets nothing through")

    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(workers[1].worker.shutdown, graceful=True)
        assert eventually(lambda: workers[0].worker._graceful_shutdown._progress.has_reached(1, 1))
        shutdown._tell = too_late
        _cut(workers)
        assert tried.wait(30)
        workers[1].worker.close()

        assert leaving.result(30) == []
        assert "while these still ran" not in caplog.text


def test_a_peer_that_leaves_with_our_answer_that_it_is_ready_is_not_told_again(workers):
    agent, shutdown = workers[1].worker.agent, workers[1].worker._graceful_shutdown
    answer, told_again = agent.answer, []

    def answer_the_last(source, message, *payload, deadline):
        if type(message) is Done:
            assert eventually(lambda: 0 in shutdown._progress.confirmed)
        answered = answer(source, message, *payload, deadline=deadline)
        if type(message) is Done:
            agent.hang_up(0, "it has left")
        return answered

    agent.answer, shutdown._tell_again = answer_the_last, told_again.append
    with ThreadPoolExecutor(2) as pool:
        leaving = [pool.submit(one.worker.shutdown, graceful=True) for one in workers]

        assert [one.result(30) for one in leaving] == [[], []]
    assert told_again == []


def test_a_phase_that_is_reached_while_the_one_before_is_told_again_is_told_too(workers):
    """Who tells all leaves a peer that was lost to the thread that tells it again."""
    shutdown, peer = workers[1].worker._graceful_shutdown, workers[0].worker._graceful_shutdown
    tell = shutdown._tell

    def told_while_the_next_is_reached(worker, phase, deadline):
        answer = tell(worker, phase, deadline)
        if phase == OVER:
            shutdown._tell_all(QUIET)
        return answer

    shutdown._tell = told_while_the_next_is_reached
    workers[1].run(gradwire.rpc_sync, "w0", torch.add, (1, 1))  # a new connection starts anew
    shutdown._phase = OVER
    shutdown._progress.disconnected(0)  # as if it were lost

    shutdown._tell_again(0)

    assert eventually(lambda: peer._progress.has_reached(1, QUIET))
    assert not shutdown._progress.is_untold(0)


# -- gradients


def held_up(gradient):
    """Once, until the gate opens."""
    gate = GATES.pop("held up", None)
    if gate is not None:
        GATES["begun"].set()
        assert gate.wait(30)
    return gradient


def weighed(x):
    """Its weight has its gradient when the other branch is held up."""
    y = x * 1
    y.register_hook(held_up)
    return y + WEIGHTS[0] * 2


def _step():
    x = torch.ones(1, requires_grad=True)
    with gradwire.context():
        gradwire.rpc_sync("w1", weighed, args=(x,)).backward()


@pytest.mark.slow
def test_the_next_pass_of_a_root_waits_until_its_last_one_is_put_back(workers):
    WEIGHTS[:] = [torch.ones(1, requires_grad=True)]
    gate = GATES["held up"] = threading.Event()
    begun = GATES["begun"] = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(workers[0].run, _step)
        assert begun.wait(30)
        assert WEIGHTS[0].grad == 2
        _cut(workers)
        with pytest.raises(PeerLost):
            first.result(30)
        # If w0 has told w1 of the failure by a connection that was ending, w1 holds the next pass
        # up. Else w0 does, and gives up after a moment.
        second = pool.submit(workers[0].run, _step)
        done, _ = wait([second], timeout=10)
        if done:
            with pytest.raises(UsageError, match=r"cannot begin until w1 confirms that p0\.1"):
                second.result()
        gate.set()
        assert eventually(lambda: not workers[1].worker.engine.passes.all())
        (pool.submit(workers[0].run, _step) if done else second).result(30)

    assert WEIGHTS[0].grad == 2
