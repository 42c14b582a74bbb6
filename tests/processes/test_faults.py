"""Rows of docs/faults.md that need a process of their own and no more."""

from __future__ import annotations

import pytest
import torch

import gradwire
from gradwire import BackwardTimeout, GradwireError, Options, PeerLost, RemoteError, Timeouts
from gradwire.autograd.messages import Gradients
from gradwire.testing import faults
from tests.faults import far
from tests.injection.processes import state, thaw
from tests.leftovers import eventually
from tests.process_cluster import process_cluster

TIMEOUTS = Timeouts(join=60, call=20, backward=2, shutdown=20)


@pytest.fixture
def others(hosts):
    options = Options(listen="unix", timeouts=TIMEOUTS)
    with process_cluster(3, expose=[far, faults], options=options, hosts=hosts) as made:
        yield made


def _is_exact(*route):
    x = torch.arange(1.0, 4.0, dtype=torch.float64, requires_grad=True)
    local = x.detach().clone().requires_grad_()
    with gradwire.context():
        y, right = x, local
        for worker in route:
            y, right = gradwire.rpc_sync(worker, far.cubed, args=(y,)), right**3
        y.sum().backward()
    right.sum().backward()
    return torch.equal(x.grad, local.grad)


def test_f2_contexts_of_a_killed_opener_are_dropped_by_all(others):
    waiting = gradwire.rpc_async("w1", far.in_a_context, args=("w2", torch.ones(1)))
    assert eventually(lambda: gradwire.rpc_sync("w2", far.contexts) == 1)

    others["w1"].kill()

    with pytest.raises(PeerLost, match="w1"):
        waiting.wait()
    assert eventually(lambda: gradwire.rpc_sync("w2", far.contexts) == 0)
    assert _is_exact("w2")


def test_f3_a_worker_frozen_in_a_backward_is_named_and_what_it_sends_late_changes_nothing(others):
    """It stops itself just before its gradients leave; they come when all is over here."""
    assert _is_exact("w1")
    # Late gradients do not wait for the send lock, which another thread of w1 may hold when it goes
    # on: then they do not come, and it is frozen again.
    assert any(_gradients_come_late(others["w1"]) for _ in range(5))
    faults.disarm()
    assert _is_exact("w1", "w2")


def _gradients_come_late(host):
    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    gradwire.rpc_sync("w1", faults.arm, args=("stop before-send Gradients",))
    with gradwire.context():
        y = gradwire.rpc_sync("w1", far.cubed, args=(x,))
        with pytest.raises(BackwardTimeout, match="w1"):
            y.backward()
    assert state(host.pid) == "T"
    heard = _frames_of(Gradients)

    thaw(host)

    have_come = eventually(lambda: _frames_of(Gradients) > heard, 2.0)
    assert gradwire.rpc_sync("w1", faults.fired) == {"stop before-send Gradients": True}
    assert x.grad is None
    gradwire.rpc_sync("w1", faults.disarm)
    return have_come


def _frames_of(kind):
    """Those that came here since this was first asked."""
    faults.arm()
    return faults.seen().get(f"after-handle {kind.__name__}", 0)


def test_f13_a_worker_without_descriptors_serves_those_who_are_connected(others):
    assert _is_exact("w1")
    gradwire.rpc_sync("w1", far.use_up_descriptors)

    assert _is_exact("w1")
    gradwire.rpc_sync("w1", far.give_descriptors_back)
    assert _is_exact("w1", "w2")


def test_f14_a_crash_in_c_is_a_lost_worker(others):
    with pytest.raises(PeerLost, match=r"w1 was lost before answering .*crash_in_c"):
        gradwire.rpc_sync("w1", far.crash_in_c)
    others["w1"].stop()  # so that nobody waits for it in the end

    assert _is_exact("w2")


@pytest.mark.parametrize(
    ("fn", "said"),
    [(far.exit_python, "SystemExit on w1: enough"), (far.interrupt, "KeyboardInterrupt on w1")],
)
def test_f14_whatever_a_function_raises_is_told_and_harms_nobody(others, fn, said):
    with pytest.raises(GradwireError, match=said) as caught:
        gradwire.rpc_sync("w1", fn)

    assert isinstance(caught.value, RemoteError)
    assert _is_exact("w1", "w2")


def test_f18_a_worker_that_holds_its_interpreter_is_not_lost(others):
    holding = gradwire.rpc_async("w1", far.hold_interpreter, args=(4.0,))

    assert gradwire.rpc_sync("w1", far.here) == "w1"
    holding.wait()
    assert _is_exact("w1")
