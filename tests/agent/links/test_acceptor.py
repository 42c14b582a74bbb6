"""The threads that accept connections, and what may interrupt them."""

from __future__ import annotations

import pytest
import torch

import gradwire
import gradwire.testing
from gradwire.agent.links.handshake import Acceptor
from gradwire.errors import UsageError


@pytest.mark.parametrize("interrupted", ["_admit", "_handshake"])
def test_a_finalizer_may_not_wait_for_the_handshake_that_it_interrupts(monkeypatch, interrupted):
    """It would dial the worker whose listener waits for it, until the deadline."""
    x, refusals = torch.ones(2), []
    real = getattr(Acceptor, interrupted)

    def interrupt(acceptor, channel):
        try:
            workers[0].run(lambda: gradwire.rpc_sync("w1", torch.neg, args=(x,), timeout=5))
        except UsageError as error:
            refusals.append(str(error))
        return real(acceptor, channel)

    with gradwire.testing.cluster(2) as workers:
        monkeypatch.setattr(Acceptor, interrupted, interrupt)
        answer = workers[0].run(lambda: gradwire.rpc_sync("w1", torch.neg, args=(x,)))

    assert torch.equal(answer, -x)
    assert "on a thread that others need" in refusals[0]
