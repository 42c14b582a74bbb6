"""Seats and incarnations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradwire.agent.peers.directory import Roster


def seated(*names):
    roster, members = Roster("job"), []
    for id, name in enumerate(names):
        roster = roster.with_member(name, id, f"at {name}")
        member = roster.entries[-1].member
        members.append(member)
    return roster, members


def test_a_later_seat_has_a_higher_incarnation_also_when_earlier_ones_are_empty():
    roster, (a, b) = seated("a", "b")
    roster = roster.without({a.incarnation, b.incarnation}).with_member("a", 0, "elsewhere")
    again = roster.entries[-1].member

    assert a.incarnation < b.incarnation < again.incarnation
    assert roster.before(again.incarnation) == []


def test_a_name_and_a_number_can_be_held_by_two():
    roster, (a, b) = seated("a", "b")

    assert roster.holders("a", 1) == [a, b]
    assert roster.holders("c", 7) == []


def test_only_earlier_entries_that_are_not_announced_are_waited_for():
    roster, (a, b, c) = seated("a", "b", "c")

    assert roster.unannounced_before(b.incarnation) == [a]
    assert roster.with_announced(a.incarnation).unannounced_before(c.incarnation) == [b]
    assert roster.without({a.incarnation}).unannounced_before(b.incarnation) == []
    assert roster.before(c.incarnation) == [a, b]


def test_a_removed_member_is_not_announced_any_more():
    roster, (a,) = seated("a")

    assert roster.with_announced(a.incarnation).has(a.incarnation)
    assert not roster.without({a.incarnation}).with_announced(a.incarnation).has(a.incarnation)


@given(st.permutations([1, 2, 3, 4, 5]))
def test_in_any_order_of_settling_somebody_may_go_on(order):
    """The first unannounced entry waits for nobody."""
    roster, members = seated(*"abcde")
    for _ in order:
        free = [
            m
            for m in members
            if m in roster.unannounced_before(9) and not roster.unannounced_before(m.incarnation)
        ]
        assert len(free) == 1
        roster = roster.with_announced(free[0].incarnation)
    assert roster.unannounced_before(9) == []
