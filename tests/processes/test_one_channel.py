"""Two processes that dial each other as they start send by one of their connections."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.current import current_worker

PASSES = 20


def received(peer: str) -> list[int]:
    """How many frames have come by each connection with this peer."""
    worker = current_worker.find()
    channels = worker.agent._connections.channels[worker.directory.number(peer)]
    return [channel.frames_received for channel in channels]


def frames_by_connection() -> tuple[list[int], list[int]]:
    x = torch.ones(2, requires_grad=True)

    def once() -> None:
        gw.rpc_sync("w1", torch.neg, args=(x,)).sum().backward()

    once()
    before = received("w1"), gw.rpc_sync("w1", received, args=("w0",))
    for _ in range(PASSES):
        once()
    after = received("w1"), gw.rpc_sync("w1", received, args=("w0",))
    return tuple(
        [now - then for now, then in zip(*each, strict=True)]
        for each in zip(after, before, strict=True)
    )


@pytest.mark.processes
@pytest.mark.slow
def test_calls_and_gradients_come_by_the_same_connection():
    for _ in range(3):  # whether both dial at once differs from start to start
        here, there = gw.run(frames_by_connection, 2, expose=[received])

        assert max(here) >= 2 * PASSES  # a result and a gradient each
        assert max(there) >= 2 * PASSES
