"""Workers that die, freeze and leave."""

from __future__ import annotations

import os
import signal

import pytest

import gradwire
from gradwire import CallTimeout, DeadlinePassed, PeerLost
from tests.injection.processes import freeze
from tests.processes import far


def test_a_killed_worker_is_named_by_what_waits_for_it(workers):
    assert gradwire.rpc_sync("w1", far.here) == "w1"
    waiting = gradwire.rpc_async("w1", far.block)
    through_w2 = gradwire.rpc_async("w2", far.block_on, args=("w1",))
    gradwire.rpc_sync("w2", far.wait_until_it_blocks)

    workers["w1"].kill()

    with pytest.raises(PeerLost, match=r"w1 was lost before answering w0#\d+ \(.*block\)"):
        waiting.wait()
    with pytest.raises(PeerLost, match=r"PeerLost on w2: w1 was lost before answering w2#\d+"):
        through_w2.wait()
    with pytest.raises(PeerLost, match=r"w1 was lost before .*here reached it"):
        gradwire.rpc_sync("w1", far.here)
    assert gradwire.rpc_sync("w2", far.here) == "w2"


def test_a_backward_pass_through_a_killed_worker_names_it(workers):
    x = far.Layer(3.0).weight

    with gradwire.context():
        y = gradwire.rpc_sync(
            "w2", far.cubed, args=(gradwire.rpc_sync("w1", far.cubed, args=(x,)),)
        )
        workers["w1"].kill()
        with pytest.raises(PeerLost, match="w1"):
            y.backward()

    assert x.grad is None


def test_shutdown_does_without_a_dead_worker_and_says_so(workers, caplog):
    gradwire.rpc_sync("w1", far.here)
    workers["w2"].kill()

    gradwire.shutdown()

    assert "w0 shut down without w2" in caplog.text


def test_a_frozen_worker_holds_up_nobody_past_a_deadline(workers):
    gradwire.rpc_sync("w1", far.here)
    freeze(workers["w1"])
    try:
        with pytest.raises(CallTimeout, match=r"w1 did not answer w0#\d+ \(.*here\) within 0.2 s"):
            gradwire.rpc_sync("w1", far.here, timeout=0.2)
        with pytest.raises(DeadlinePassed, match="w0 shut down without w1") as late:
            gradwire.shutdown(timeout=0.5)
    finally:
        os.kill(workers["w1"].pid, signal.SIGCONT)

    assert (late.value.peer, late.value.phase) == ("w1", "shutdown")


def test_leaving_waits_for_calls_that_are_still_under_way(workers):
    futures = [gradwire.rpc_async("w1", far.through, args=(["w2", "w1"], 1)) for _ in range(20)]

    gradwire.shutdown()

    assert [future.wait()[1] for future in futures] == [8] * 20


def test_a_reference_left_over_at_shutdown_harms_nobody(workers):
    mine = gradwire.RRef(far.Kept())
    gradwire.rpc_sync("w1", far.keep, args=(mine,))
    theirs = gradwire.remote("w2", far.Kept)

    gradwire.shutdown()

    assert theirs.owner_name() == "w2"


def test_shutdown_without_waiting_leaves_at_once(workers, caplog):
    waiting = gradwire.rpc_async("w1", far.block)

    gradwire.shutdown(graceful=False)

    with pytest.raises(PeerLost, match="w0 shut down before an answer came"):
        waiting.wait()
    workers["w1"].stop()
