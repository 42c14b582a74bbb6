"""Who has to go when too many stand at the door."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradwire.agent.links.handshake_state import PendingHandshakes


def test_nobody_has_to_go_while_there_is_room():
    pending_handshakes = PendingHandshakes(2, 1.0)
    pending_handshakes.add("a", 0.0)

    assert pending_handshakes.has_room
    assert pending_handshakes.maybe_overdue(100.0) is None


def test_the_oldest_has_to_go_once_it_has_had_its_time():
    pending_handshakes = PendingHandshakes(2, 1.0)
    pending_handshakes.add("a", 0.0)
    pending_handshakes.add("b", 0.5)

    assert not pending_handshakes.has_room
    assert pending_handshakes.maybe_overdue(0.9) is None
    assert pending_handshakes.next_due() == 1.0
    assert pending_handshakes.maybe_overdue(1.0) == "a"
    assert pending_handshakes.remove("a")
    assert not pending_handshakes.remove("a")
    assert pending_handshakes.has_room
    assert pending_handshakes.next_due() == 1.5


def test_who_has_shown_who_it_is_makes_room():
    pending_handshakes = PendingHandshakes(1, 1.0)
    pending_handshakes.add("a", 0.0)
    pending_handshakes.remove("a")

    assert pending_handshakes.has_room


@given(st.lists(st.floats(0, 2), max_size=60), st.integers(1, 5))
def test_there_are_never_more_and_each_has_its_time(pauses, most):
    pending_handshakes, since, now = PendingHandshakes(most, 1.0), {}, 0.0
    for who, pause in enumerate(pauses):
        now += pause
        if not pending_handshakes.has_room:
            now = max(now, pending_handshakes.next_due())
            late = pending_handshakes.maybe_overdue(now)
            assert now >= since.pop(late) + 1.0
            pending_handshakes.remove(late)
        pending_handshakes.add(who, now)
        since[who] = now
        assert len(since) <= most
