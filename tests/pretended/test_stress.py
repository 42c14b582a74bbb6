"""Random programs on pretended devices are exact; without any one rule of streams they are not."""

from __future__ import annotations

import pytest

from gradwire.agent.devices.links import DeviceLinks
from gradwire.testing.pretend import streams
from gradwire.testing.pretend.driver import PretendBlock, PretendDriver
from tests.pretended.stress import DEVICE, play

PROGRAMS = range(150)


def test_programs_are_exact():
    assert play(PROGRAMS) == []


def test_programs_are_exact_if_the_lane_is_too_small_for_them():
    assert play(range(1000, 1050), budget=0) == []


def unsent_ready(patch):
    """R1: what is filled is not recorded before the message leaves."""
    patch.setattr(PretendBlock, "filled", lambda self, stream: None)


def freed_too_early(patch):
    """R1: the allocator is not told that a tensor is still being copied."""

    def fill(self, offset, tensor, stream):
        source, end = tensor.memory, offset + tensor.nbytes
        into = self._memory[offset:end]
        stream.queue(lambda: into.copy_(source.reshape(-1).view(into.dtype)))

    patch.setattr(PretendBlock, "fill", fill)


def taken_at_once(patch):
    """R2: the receiver does not wait until the block is filled."""
    patch.setattr(PretendBlock, "begin_taking", lambda self, stream: None)


def filled_again(patch):
    """R2: the owner does not wait until the block was read."""
    patch.setattr(PretendBlock, "begin", lambda self, stream, was_taken: None)


def no_handoff(patch):
    """R3: whoever waits for a future does not wait for the stream that decoded it."""
    decode = DeviceLinks.decode

    def elsewhere(self, *args):
        with streams.use_stream(streams.Stream(DEVICE)):
            return decode(self, *args)

    patch.setattr(DeviceLinks, "decode", elsewhere)
    patch.setattr(PretendDriver, "handoff", lambda self, tensor: lambda: None)


def gradients_anywhere(patch):
    """R5: a Send does not bring the gradients to the stream that uses them."""
    decode = DeviceLinks.decode_at

    def elsewhere(self, *args):
        with streams.use_stream(streams.Stream(DEVICE)):
            return decode(self, *args)

    patch.setattr(DeviceLinks, "decode_at", elsewhere)
    patch.setattr(PretendDriver, "handoff", lambda self, tensor: lambda: None)


@pytest.mark.parametrize(
    "mutate",
    [
        unsent_ready,
        freed_too_early,
        taken_at_once,
        filled_again,
        no_handoff,
        gradients_anywhere,
    ],
)
def test_without_a_rule_programs_are_wrong(mutate, monkeypatch):
    mutate(monkeypatch)

    assert play(PROGRAMS) != []
