"""Cancelled calls: the callee is told, and the function ends early."""

from __future__ import annotations

import signal
import sys
import threading

import pytest
import torch

import gradwire as gw
from gradwire.agent.messages import Cancel
from gradwire.agent.serving.dispatch import Source
from gradwire.errors import CallTimeout, Cancelled, PeerLost, UsageError
from gradwire.options import Options
from gradwire.rpc.behavior import Behavior
from gradwire.testing import cluster
from gradwire.testing.clock import ManualClock
from tests.gates import GATES
from tests.hearing import hearing
from tests.leftovers import assert_nothing_left, eventually

HERE = sys.modules[__name__]
ONE_AT_A_TIME = Options(threads=1)
SEEN: dict[str, list[str]] = {}
"""What functions have left behind, by gate."""


@pytest.fixture
def gate(request):
    name = request.node.name
    GATES[name], GATES[name + " begun"], SEEN[name] = threading.Event(), threading.Event(), []
    yield name
    GATES[name].set()


@pytest.fixture
def workers(gate):
    with cluster(3, expose=[HERE]) as made:
        yield made
        GATES[gate].set()
        assert_nothing_left(made)


# -- what runs on the workers


def name():
    return gw.get_worker_info().name


def mark(gate, what):
    SEEN[gate].append(what)
    return what


def hold(gate):
    """Computes without gradwire until the gate opens, then uses it."""
    GATES[gate + " begun"].set()
    assert GATES[gate].wait(30)
    try:
        gw.rpc_sync("w2", mark, args=(gate, "went on"))
    except gw.GradwireError as error:
        mark(gate, f"{type(error).__name__}: {error}")
        raise


def hold_elsewhere(gate):
    """Waits in gradwire for a function that waits at the gate."""
    try:
        gw.rpc_sync("w2", hold, args=(gate,))
    except gw.GradwireError as error:
        mark(gate, type(error).__name__)
        raise


def kept(gate):
    hold(gate)
    return torch.ones(2)


# -- the tests


def begun(gate):
    assert GATES[gate + " begun"].wait(30)


def test_a_function_that_has_not_begun_is_dropped_when_its_caller_has_given_up(gate):
    with cluster(2, expose=[HERE], options=ONE_AT_A_TIME) as two:
        first = two[0].run(gw.rpc_async, "w1", hold_here, args=(gate,))
        begun(gate)
        with pytest.raises(CallTimeout):
            two[0].run(gw.rpc_sync, "w1", mark, args=(gate, "ran"), timeout=0.02)
        inbound_requests = two[1].worker.agent.dispatch.inbound_requests
        assert eventually(lambda: any(e.cancelled for e in list(inbound_requests)))
        GATES[gate].set()

        assert first.wait() == "w1"
        assert two[0].run(gw.rpc_sync, "w1", name) == "w1"
        assert_nothing_left(two)

    assert SEEN[gate] == []


def test_the_references_of_a_function_that_never_began_are_let_go(gate):
    with cluster(2, expose=[HERE], options=ONE_AT_A_TIME) as two:
        theirs = two[0].run(gw.remote, "w1", torch.ones, args=(2,))
        mine = two[0].run(gw.RRef, torch.ones(2))
        first = two[0].run(gw.rpc_async, "w1", hold_here, args=(gate,))
        begun(gate)
        with pytest.raises(CallTimeout):
            two[0].run(gw.rpc_sync, "w1", mark, args=(gate, [mine, theirs]), timeout=0.02)
        inbound_requests = two[1].worker.agent.dispatch.inbound_requests
        assert eventually(lambda: any(e.cancelled for e in list(inbound_requests)))
        GATES[gate].set()
        first.wait()
        del mine, theirs

        assert_nothing_left(two)


def test_a_value_that_is_made_only_after_its_call_was_called_off_is_let_go(gate):
    """w1 asks w2 for it, for a call of w0's; w2 is busy with another until that is called off."""
    with cluster(3, expose=[HERE], options=ONE_AT_A_TIME) as three:
        busy = three[0].run(gw.rpc_async, "w2", hold_here, args=(gate,))
        begun(gate)
        outer = three[0].run(gw.rpc_async, "w1", fetched_from_w2)
        refs = three[1].worker.refs
        assert eventually(lambda: refs.statistics().held == 1)
        outer.cancel()
        with pytest.raises(Cancelled):
            outer.wait()
        assert not eventually(lambda: refs.statistics().held == 0, 0.2)  # w2 does not know it yet
        GATES[gate].set()
        busy.wait()

        assert_nothing_left(three)


def fetched_from_w2():
    return gw.remote("w2", name).to_here()


def hold_here(gate):
    GATES[gate + " begun"].set()
    assert GATES[gate].wait(30)
    return name()


def test_a_running_function_ends_at_its_next_use_of_gradwire(workers, gate):
    with workers[0].worker.scope():
        call = gw.rpc_async("w1", hold, args=(gate,))
        begun(gate)
        with cancelled_on(workers[1]):
            assert call.cancel()
        GATES[gate].set()
        with pytest.raises(Cancelled, match=r"w0#\d+ \(.*hold\) on w1 was cancelled: its future"):
            call.wait()
        assert not call.cancel()

    assert eventually(lambda: SEEN[gate])
    (said,) = SEEN[gate]
    assert "was cancelled: w0 does not wait for it any more" in said


def test_a_behavior_may_run_what_nobody_waits_for(gate):
    """As torch.distributed.rpc does: a call that is late runs, and so does one behind it."""
    behavior = Behavior(runs_what_is_late=True)
    with cluster(3, expose=[HERE], options=ONE_AT_A_TIME, behavior=behavior) as three:
        with three[0].worker.scope():
            late = gw.rpc_async("w1", hold_here, args=(gate,), timeout=0.05)
            behind = gw.rpc_async("w1", mark, args=(gate, "ran"), timeout=0.05)
            begun(gate)
            for call in (late, behind):
                with pytest.raises(CallTimeout):
                    call.wait()
        GATES[gate].set()

        assert eventually(lambda: SEEN[gate] == ["ran"])
        assert_nothing_left(three)


class cancelled_on:  # read as a sentence
    """Waits at the end of the block until a worker has heard that a call was called off."""

    def __init__(self, member):
        self._hearing = hearing(member.worker, self._note)
        self._heard = threading.Event()

    def __enter__(self):
        self._hearing.__enter__()

    def _note(self, event):
        if event.what == "cancel":
            self._heard.set()

    def __exit__(self, *error):
        assert self._heard.wait(30)
        self._hearing.__exit__(*error)


def test_it_spreads_to_the_calls_that_were_made_for_it(workers, gate):
    with workers[0].worker.scope():
        call = gw.rpc_async("w1", hold_elsewhere, args=(gate,))
        begun(gate)
        with cancelled_on(workers[2]):
            call.cancel()
        assert eventually(lambda: SEEN[gate] == ["Cancelled"])  # while the gate is closed
        GATES[gate].set()

    assert eventually(lambda: len(SEEN[gate]) == 2)
    assert SEEN[gate][1].startswith("Cancelled: the enclosing call was cancelled")


def test_a_timeout_is_told(gate):
    clock = ManualClock()
    with cluster(3, expose=[HERE], clock=clock) as three:
        call = three[0].run(gw.rpc_async, "w1", hold, args=(gate,), timeout=10)
        begun(gate)
        with cancelled_on(three[1]):
            clock.advance(10.01)
            with pytest.raises(CallTimeout):
                call.wait()
        GATES[gate].set()

        assert eventually(lambda: SEEN[gate])
        assert "went on" not in SEEN[gate]
        del call
        assert_nothing_left(three)


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals go to the main thread",
)
def test_an_interrupt_is_told(workers, gate):
    def interrupt():
        begun(gate)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=lambda: (begun(gate), signal.pthread_kill(main, signal.SIGINT))).start()
    main = threading.main_thread().ident
    with cancelled_on(workers[1]), pytest.raises(KeyboardInterrupt):
        workers[0].run(gw.rpc_sync, "w1", hold, args=(gate,))
    GATES[gate].set()

    assert eventually(lambda: SEEN[gate])
    assert "went on" not in SEEN[gate]


def test_a_ctrl_c_in_what_a_waiting_thread_serves_is_its_own(workers):
    """It comes while the thread handles a message of a peer's, and is no answer to that peer."""

    def interrupted():
        raise KeyboardInterrupt

    agent = workers[0].worker.agent
    source = Source(1, None, 7)

    with pytest.raises(KeyboardInterrupt):
        agent.guarded(source, interrupted)


def test_what_a_lost_worker_asked_for_ends(workers, gate):
    call = workers[0].run(gw.rpc_async, "w1", hold_elsewhere, args=(gate,))
    begun(gate)

    workers[0].worker.close()

    assert eventually(lambda: SEEN[gate] == ["Cancelled"])
    with pytest.raises(PeerLost):
        call.wait()


def test_what_is_kept_for_references_is_made_though_nobody_waits(workers, gate):
    reference = workers[0].run(gw.remote, "w1", kept, args=(gate,))
    begun(gate)
    with workers[0].worker.scope(), pytest.raises(CallTimeout):
        reference.to_here(timeout=0.05)
    GATES[gate].set()

    assert workers[0].run(reference.to_here).tolist() == [1, 1]
    del reference


def test_a_future_that_is_let_go_of_is_not_called_off(workers, gate):
    GATES[gate].set()

    workers[0].run(gw.rpc_async, "w1", hold, args=(gate,))

    assert eventually(lambda: SEEN[gate] == ["went on"])


def test_what_follows_a_call_cannot_be_cancelled(workers, gate):
    with workers[0].worker.scope():
        call = gw.rpc_async("w1", hold, args=(gate,))
        following = call.then(lambda done: done.wait())
        assert not following.cancel()
        call.cancel()
        with pytest.raises(Cancelled):
            following.wait()


def test_what_is_not_a_call_of_the_peers_is_left_alone(workers, gate):
    """A Cancel for numbers that mean nothing, or those of another worker, does nothing."""
    call = workers[0].run(gw.rpc_async, "w1", hold_here, args=(gate,))
    begun(gate)
    agent = workers[1].worker.agent
    (inbound,) = agent.dispatch.inbound_requests
    channels = agent._connections.channels
    assert channels[0] == [inbound.channel]  # so a Cancel on another channel is of another worker

    agent._cancels._serve(Cancel([inbound.request + 1]), None, Source(0, inbound.channel, 0))
    agent._cancels._serve(Cancel([inbound.request]), None, Source(2, object(), 0))
    assert not inbound.cancelled
    GATES[gate].set()
    assert call.wait() == "w1"


def test_a_cancelled_call_leaves_the_next_pass_exact(workers, gate):
    x = torch.tensor(3.0, requires_grad=True)
    with workers[0].worker.scope(), gw.context():
        y = gw.rpc_sync("w1", torch.mul, args=(x, x))
        call = gw.rpc_async("w1", hold, args=(gate,))
        call.cancel()
        GATES[gate].set()
        gw.rpc_sync("w2", torch.mul, args=(y, x)).backward()

    assert x.grad == 27.0


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf"), float("nan")])
def test_shutdown_wants_a_time_that_ends(workers, gate, timeout):
    with pytest.raises(UsageError, match="is not a positive, finite number of seconds"):
        workers[0].worker.shutdown(graceful=True, timeout=timeout)
