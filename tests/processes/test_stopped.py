"""A worker is stopped in the middle of its work: whoever waits for it has its error in time."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire import BackwardTimeout, CallTimeout, Options, StepFailed, Timeouts, UsageError
from tests.injection.processes import freeze
from tests.leftovers import eventually
from tests.process_cluster import process_cluster
from tests.processes import far

SECONDS = 1.0
LATE_SECONDS = 0.75
"""By which an error may be late on a busy machine; to wait for an answer that was not to come took
a second, or one and a half.
"""
TIMEOUTS = Timeouts(join=60, call=60, backward=SECONDS, step=60, shutdown=60, suspect=60, dead=60)


@pytest.fixture
def workers(hosts):
    options = Options(listen="unix", timeouts=TIMEOUTS)
    with process_cluster(3, expose=[far], options=options, hosts=hosts) as others:
        yield others
        far.forget()


def _is_stopped(pid):
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"


@contextmanager
def stopped(host):
    """Inside the block the process does nothing: the signal takes a moment to reach it."""
    freeze(host)
    try:
        assert eventually(lambda: _is_stopped(host.pid))
        yield
    finally:
        os.kill(host.pid, signal.SIGCONT)


@contextmanager
def in_time(seconds=SECONDS):
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds + LATE_SECONDS


def _layers():
    layers = [gradwire.remote(owner, far.Layer, args=(2.0,)) for owner in ("w1", "w2")]
    refs = [layer.rpc_sync().reference() for layer in layers]
    return layers, gradwire.DistributedOptimizer(torch.optim.SGD, refs, lr=0.5)


def _loss(layers):
    x = torch.ones((), dtype=torch.float64)
    for layer in layers:
        x = layer.rpc_sync().forward(x)
    return x


def _native(context, loss):
    loss.backward(retain_graph=True)


def _into_the_map(context, loss):
    gradwire.backward(context, [loss], retain_graph=True)


def _within(context, loss):
    gradwire.backward(context, [loss], retain_graph=True, timeout=SECONDS / 2)


@pytest.mark.parametrize("run", [_native, _into_the_map, _within])
def test_a_backward_ends_at_its_deadline_and_what_it_did_is_put_back_later(workers, run):
    """w2 has run by then. The next pass waits for both, as long as it has time itself."""
    layers, _ = _layers()
    with gradwire.context() as context:
        loss = _loss(layers)
        with stopped(workers["w1"]):
            with in_time(), pytest.raises(BackwardTimeout, match="not done: w1"):
                run(context, loss)
            until = r"p0\.2.* cannot begin until w1 confirms that p0\.1 was rolled back"
            with in_time(), pytest.raises(UsageError, match=until) as refused:
                _native(context, loss)
        assert "hint: try again when it has answered" in str(refused.value)

        _native(context, loss)

        gradients = [layer.rpc_sync().gradient() for layer in layers]
    assert gradients == [2, 2]
    assert eventually(lambda: gradwire.rpc_sync("w1", far.leftovers) == [0, 0, 0])


def test_a_step_ends_at_its_deadline_and_others_may_step_the_same_parameters(workers):
    layers, optimizer = _layers()
    with gradwire.context() as context:
        gradwire.backward(context, [_loss(layers)])
        with (
            stopped(workers["w1"]),
            in_time(),
            pytest.raises(StepFailed, match=r"no worker has stepped\. w1: w1 did not answer"),
        ):
            optimizer.step(context, timeout=SECONDS)
        assert [layer.rpc_sync().value() for layer in layers] == [2, 2]

        optimizer.step(context)

    assert [layer.rpc_sync().value() for layer in layers] == [1, 1]


def _call():
    gradwire.rpc_sync("w1", far.here, timeout=SECONDS)


def _future():
    gradwire.rpc_async("w1", far.here, timeout=SECONDS).wait()


@pytest.mark.parametrize("wait", [_call, _future])
def test_a_call_ends_at_its_deadline(workers, wait):
    gradwire.rpc_sync("w1", far.here)
    with stopped(workers["w1"]), in_time(), pytest.raises(CallTimeout, match="w1 did not answer"):
        wait()


def test_a_fetch_ends_at_its_deadline(workers):
    reference = gradwire.remote("w1", far.Layer, args=(2.0,))
    reference.rpc_sync().value()
    with stopped(workers["w1"]), in_time(), pytest.raises(CallTimeout, match="w1 did not answer"):
        reference.to_here(timeout=SECONDS)


def test_a_context_closes_though_a_worker_in_it_has_not_put_back(workers):
    layers, _ = _layers()
    with ExitStack() as meanwhile:
        with gradwire.context():
            loss = _loss(layers)
            meanwhile.enter_context(stopped(workers["w1"]))
            with in_time(), pytest.raises(BackwardTimeout):
                loss.backward()
        with in_time():
            # One request stays open: w1 has not confirmed that it has put the pass back. w2 may be
            # about to.
            assert eventually(lambda: far.leftovers() == [0, 0, 1])
    assert eventually(lambda: far.leftovers() == [0, 0, 0])
    assert eventually(lambda: gradwire.rpc_sync("w1", far.leftovers) == [0, 0, 0])
    assert [layer.rpc_sync().gradient() for layer in layers] == [None, None]
