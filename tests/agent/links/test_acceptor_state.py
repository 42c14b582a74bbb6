"""Who has to go when too many stand at the door."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradwire.agent.links.acceptor_state import Strangers


def test_nobody_has_to_go_while_there_is_room():
    strangers = Strangers(2, 1.0)
    strangers.came("a", 0.0)

    assert strangers.has_room
    assert strangers.maybe_overdue(100.0) is None


def test_the_oldest_has_to_go_once_it_has_had_its_time():
    strangers = Strangers(2, 1.0)
    strangers.came("a", 0.0)
    strangers.came("b", 0.5)

    assert not strangers.has_room
    assert strangers.maybe_overdue(0.9) is None
    assert strangers.next_due() == 1.0
    assert strangers.maybe_overdue(1.0) == "a"
    strangers.gone("a")
    strangers.gone("a")
    assert strangers.has_room
    assert not strangers.has("a")
    assert strangers.next_due() == 1.5


def test_who_has_shown_who_it_is_makes_room():
    strangers = Strangers(1, 1.0)
    strangers.came("a", 0.0)
    strangers.gone("a")

    assert strangers.has_room


@given(st.lists(st.floats(0, 2), max_size=60), st.integers(1, 5))
def test_there_are_never_more_and_each_has_its_time(pauses, most):
    strangers, since, now = Strangers(most, 1.0), {}, 0.0
    for who, pause in enumerate(pauses):
        now += pause
        if not strangers.has_room:
            now = max(now, strangers.next_due())
            late = strangers.maybe_overdue(now)
            assert now >= since.pop(late) + 1.0
            strangers.gone(late)
        strangers.came(who, now)
        since[who] = now
        assert len(since) <= most
