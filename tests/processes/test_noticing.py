"""Workers that are killed, frozen or busy: who notices, and what is said of it."""

from __future__ import annotations

import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire import CallTimeout, Options, PeerLost, StepFailed, Timeouts
from gradwire.current import current_worker
from tests.injection.processes import freeze
from tests.leftovers import eventually
from tests.process_cluster import process_cluster
from tests.processes import far

TIMEOUTS = Timeouts(join=60, call=60, backward=60, step=60, shutdown=60)
HASTY = Timeouts(join=60, call=60, backward=60, shutdown=60, suspect=0.5, dead=3.0)
"""Not shorter: a worker that a busy machine does not run for a second is not dead."""


@pytest.fixture
def hasty(hosts):
    options = Options(listen="unix", timeouts=HASTY)
    with process_cluster(3, expose=[far], options=options, hosts=hosts) as others:
        yield others
        far.forget()


def _x():
    return torch.tensor(3.0, dtype=torch.float64, requires_grad=True)


# -- what waits for w1, which is in the middle of it


def _call():
    gradwire.rpc_sync("w1", far.block_here)


def _future():
    gradwire.rpc_async("w1", far.block_here).wait()


def _then():
    gradwire.rpc_async("w1", far.block_here).then(lambda done: done.wait()).wait()


def _fetch():
    gradwire.remote("w1", far.block_here).to_here()


def _call_in_context():
    with gradwire.context():
        gradwire.rpc_sync("w1", far.block_here)


def _backward():
    with gradwire.context():
        gradwire.rpc_sync("w1", far.blocking_backward, args=(_x(),)).backward()


def _backward_into_map():
    with gradwire.context() as context:
        y = gradwire.rpc_sync("w1", far.blocking_backward, args=(_x(),))
        gradwire.backward(context, [y])


def _backward_through_w2():
    with gradwire.context():
        gradwire.rpc_sync("w2", far.relayed, args=("w1", _x())).backward()


def _step():
    layers = [gradwire.remote(owner, far.Layer, args=(2.0,)) for owner in ("w2", "w1")]
    refs = [layer.rpc_sync().reference() for layer in layers]
    optimizer = gradwire.DistributedOptimizer(far.Blocking, refs, lr=0.5)
    with gradwire.context() as context:
        x = torch.ones((), dtype=torch.float64)
        gradwire.backward(context, [sum(layer.rpc_sync().forward(x) for layer in layers)])
        optimizer.step(context)


WAITS = {
    _call: "call",
    _future: "call",
    _then: "call",
    _fetch: "call",
    _call_in_context: "forward",
    _backward: "backward",
    _backward_into_map: "backward",
    _backward_through_w2: "backward",
    _step: "step",
}


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.__name__.strip("_"))
def test_whatever_waits_for_a_killed_worker_ends_with_its_connection(workers, wait):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        gradwire.rpc_sync("w1", far.wait_until_it_blocks)
        workers["w1"].kill()
        with pytest.raises((PeerLost, StepFailed), match="w1 was lost") as lost:
            waiting.result(30)

    assert lost.value.peer == "w1"
    assert lost.value.phase == WAITS[wait]
    assert lost.value.link.startswith("unix://") or wait is _step
    lost.value.with_traceback(None)
    assert eventually(lambda: gradwire.rpc_sync("w2", far.leftovers) == [0, 0, 0])
    with gradwire.context():  # and those that are left go on
        x = _x()
        gradwire.rpc_sync("w2", far.cubed, args=(x,)).backward()
    assert x.grad == 27.0


def test_a_reference_that_a_killed_worker_has_not_counted_yet_is_not_waited_for(workers):
    gradwire.rpc_sync("w1", far.here)
    freeze(workers["w1"])
    reference = gradwire.remote("w1", far.Kept)
    with ThreadPoolExecutor(1) as pool:
        gradwire.rpc_sync("w2", far.keep, args=(reference,))
        waiting = pool.submit(gradwire.rpc_sync, "w2", far.where_of_kept)
        workers["w1"].kill()
        with pytest.raises(PeerLost, match="w1"):
            waiting.result(30)


def test_shutdown_does_not_wait_for_a_worker_that_is_killed_meanwhile(workers, caplog):
    with ThreadPoolExecutor(2) as pool:
        blocked = pool.submit(_future)
        gradwire.rpc_sync("w1", far.wait_until_it_blocks)
        leaving = pool.submit(gradwire.shutdown)
        workers["w1"].kill()
        leaving.result(30)
        with pytest.raises(PeerLost):
            blocked.result(30)

    assert "w0 shut down without w1" in caplog.text


def test_the_middle_of_a_pass_notices_that_its_neighbour_was_killed(workers):
    """w2, not the root, waits for w1; both end the pass, and nothing is left."""
    x = _x()
    with gradwire.context(), ThreadPoolExecutor(1) as pool:
        y = gradwire.rpc_sync("w2", far.relayed, args=("w1", x))
        waiting = pool.submit(y.backward)
        gradwire.rpc_sync("w1", far.wait_until_it_blocks)
        workers["w1"].kill()
        with pytest.raises(PeerLost, match="w1"):
            waiting.result(30)
        assert eventually(lambda: gradwire.rpc_sync("w2", far.leftovers)[1] == 0)

    assert x.grad is None


def test_a_context_ends_everywhere_with_the_worker_that_opened_it(workers):
    """w1 opens it, and dies; w2 was called in it, and w0 by w2."""
    doomed = gradwire.rpc_async("w1", far.keep_context, args=(torch.ones(2), ["w2", "w0"]))
    gradwire.rpc_sync("w1", far.wait_until_it_blocks)
    assert gradwire.rpc_sync("w2", far.leftovers)[0] == 1
    assert far.leftovers()[0] == 1

    workers["w1"].kill()

    with pytest.raises(PeerLost):
        doomed.wait()
    assert eventually(lambda: gradwire.rpc_sync("w2", far.leftovers) == [0, 0, 0])
    assert eventually(lambda: far.leftovers() == [0, 0, 0])


# -- silence


def is_stopped(pid):
    """Whether all threads of a process are: the signal takes a moment to reach them."""
    states = [
        path.read_text().rsplit(")", 1)[1] for path in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return all(state.split()[0] == "T" for state in states)


@contextmanager
def frozen(host):
    freeze(host)
    assert eventually(lambda: is_stopped(host.pid)), "it still runs"
    try:
        yield
    finally:
        os.kill(host.pid, signal.SIGCONT)


def test_a_frozen_worker_is_suspected_and_given_up_and_may_come_back(hasty, caplog):
    call = gradwire.rpc_async("w1", far.block_here)
    gradwire.rpc_sync("w1", far.wait_until_it_blocks)

    with frozen(hasty["w1"]), pytest.raises(PeerLost) as lost:
        call.wait()

    assert "w1 was lost before answering w0#" in str(lost.value)
    assert re.search(r"no sign of life for [\d.]+ s", str(lost.value))
    assert (lost.value.peer, lost.value.phase) == ("w1", "call")
    assert "w0: w1 has given no sign of life for" in caplog.text
    assert gradwire.rpc_sync("w1", far.here) == "w1"
    with gradwire.context():
        x = _x()
        gradwire.rpc_sync("w1", far.cubed, args=(x,)).backward()
    assert x.grad == 27.0
    gradwire.rpc_sync("w1", far.open_gate)


def test_a_timeout_says_that_the_worker_is_silent(hasty):
    gradwire.rpc_sync("w1", far.here)

    with frozen(hasty["w1"]), pytest.raises(CallTimeout, match="no sign of life for") as late:
        gradwire.rpc_sync("w1", far.here, timeout=1.5)

    assert (late.value.peer, late.value.phase) == ("w1", "call")


def test_what_a_worker_says_that_was_given_up_is_refused_and_counted(hasty):
    x = _x()
    with gradwire.context(), ThreadPoolExecutor(1) as pool:
        y = gradwire.rpc_sync("w1", far.blocking_backward, args=(x * 1,))
        waiting = pool.submit(y.backward)
        gradwire.rpc_sync("w1", far.wait_until_it_blocks)
        with frozen(hasty["w1"]), pytest.raises(PeerLost, match="no sign of life"):
            waiting.result(30)
    gradwire.rpc_sync("w1", far.open_gate)  # its run goes on, and says how it ended

    assert eventually(lambda: gradwire.refusals().get("late", 0) >= 1)
    assert x.grad is None
    assert eventually(lambda: gradwire.rpc_sync("w1", far.leftovers) == [0, 0, 0])


@pytest.mark.parametrize("busy", [far.hold_interpreter, far.doze], ids=lambda f: f.__name__)
def test_a_busy_worker_is_not_given_up(hasty, busy):
    seconds = 1.0 if busy is far.hold_interpreter else 1.5 * HASTY.dead

    assert gradwire.rpc_sync("w1", busy, args=(seconds,)) == "w1"
    assert gradwire.rpc_sync("w1", far.here) == "w1"


def test_four_seconds_in_a_call_that_holds_the_interpreter_are_nothing(workers, caplog):
    assert gradwire.rpc_sync("w1", far.hold_interpreter, args=(4,)) == "w1"

    assert caplog.text == ""


def test_idle_workers_hear_of_each_other_and_busy_ones_say_nothing_more(hasty):
    gradwire.rpc_sync("w1", far.here)
    connections = current_worker.find().agent._connections
    used = connections.to(1, 0.0)
    (line,) = [line for line in connections.readers.all() if line.channel is used]
    idle = line.reads
    assert eventually(lambda: line.reads >= idle + 10, 30)  # far more than `dead` seconds

    before, calls, end = line.reads, 0, threading.Event()
    threading.Timer(1.5, end.set).start()
    while not end.is_set():
        gradwire.rpc_sync("w1", far.here)
        calls += 1
    assert line.reads <= before + calls + 1  # one may have been on its way when they began


# -- called off


def test_a_call_that_timed_out_stops_where_it_runs(workers, tmp_path):
    path = tmp_path / "marker"
    far.forget()
    with pytest.raises(CallTimeout):
        gradwire.rpc_sync("w1", far.mark_when_told, args=(str(path),), timeout=2)
    gradwire.rpc_sync("w1", far.wait_until_it_blocks)
    gradwire.rpc_sync("w1", far.open_gate)

    assert eventually(lambda: gradwire.rpc_sync("w1", far.leftovers)[2] == 0)
    gradwire.shutdown()  # all that was asked for is over
    assert not path.exists()
