"""Whose turn it is at an actor: decided without threads or messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradwire.rpc.actors.mailbox_state import MailboxState


def test_one_at_a_time_in_order_of_arrival():
    box = MailboxState()
    box.arrived("a", 1)
    box.arrived("b", 1)

    assert box.maybe_next() == "a"
    assert box.maybe_next() is None
    assert box.ended()
    assert box.maybe_next() == "b"
    assert not box.ended()
    assert box.is_idle


@given(st.integers(1, 4), st.lists(st.booleans(), max_size=60))
def test_no_more_run_than_may_and_none_is_passed_over(most, steps):
    """True: a call arrives. False: one that runs ends. Each step tries to begin once, as a job."""
    box, arrived, begun, running = MailboxState(), 0, [], 0
    for arrives in steps:
        if arrives:
            box.arrived(arrived, most)
            arrived += 1
        elif running:
            running -= 1
            box.ended()
        if (call := box.maybe_next()) is not None:
            begun.append(call)
            running += 1
        assert running <= most
        assert running == min(most, running + arrived - len(begun)), "a call waits for nothing"
    assert begun == list(range(len(begun)))
    assert box.is_idle == (not running and len(begun) == arrived)
