"""Who is let in, whom a newcomer replaces, who has left."""

from __future__ import annotations

import pytest

from gradwire.agent.peers.state import Member, Members
from gradwire.errors import BadMessage

A, B, C = (
    Member(id, name, name, life) for id, name, life in [(0, "a", 1), (1, "b", 2), (2, "c", 3)]
)


def names(members):
    return [member.name for member in members.all()]


def test_a_closed_world_admits_nobody_new():
    members = Members(0, [A, B])

    assert members.admit(B) == []
    with pytest.raises(BadMessage, match="c claims the number of worker 2"):
        members.admit(C)


def test_a_closed_world_admits_a_later_life_of_a_member():
    members = Members(0, [A, B])
    later = Member(1, "b", "elsewhere", 3)

    assert 1 not in members.gone
    assert members.admit(later) == [B]
    assert members.admit(later) == []
    assert members.by_id.get(1) == members.by_name.get("b") == later
    assert 1 in members.gone
    with pytest.raises(BadMessage, match="b speaks for an earlier life of b"):
        members.admit(B)


@pytest.mark.parametrize(
    "claim",
    [Member(1, "x", "", 9), Member(0, "b", "", 9), Member(2, "b", "", 9), Member(0, "a", "", 9)],
)
def test_nobody_else_takes_a_place_in_a_closed_world(claim):
    with pytest.raises(BadMessage, match="claims the number of"):
        Members(0, [A, B]).admit(claim)


def test_an_open_world_admits_newcomers_once():
    members = Members(0, [A], is_open=True)

    assert members.admit(B) == members.admit(B) == []
    assert names(members) == ["a", "b"]
    assert members.by_name.get("b") == members.by_id.get(1) == B


def test_one_that_left_is_remembered_by_number_only():
    members = Members(0, [A, B], is_open=True)

    assert members.left(1, 2) == B
    assert members.left(1, 2) is None
    assert members.by_name.get("b") is members.by_id.get(1) is None
    assert members.latest[1] == B


@pytest.mark.parametrize(
    "later", [Member(1, "b", "", 9), Member(1, "other", "", 9), Member(7, "b", "", 9)]
)
def test_a_later_life_takes_the_place_of_one_that_left_or_died(later):
    left, died = Members(0, [A, B], is_open=True), Members(0, [A, B], is_open=True)
    left.left(1, 2)

    assert left.admit(later) == []
    assert died.admit(later) == [B]
    assert left.all() == died.all() == [A, later]


def test_it_may_take_the_places_of_two():
    members = Members(0, [A, B, C], is_open=True)

    assert members.admit(Member(1, "c", "", 9)) == [B, C]
    assert names(members) == ["a", "c"]


@pytest.mark.parametrize("has_left", [True, False])
def test_an_earlier_life_does_not_come_back(has_left):
    members = Members(0, [A, Member(1, "b", "", 9)], is_open=True)
    if has_left:
        members.left(1, 9)

    with pytest.raises(BadMessage, match="b speaks for an earlier life of b"):
        members.admit(B)


def test_a_late_goodbye_of_an_earlier_life_is_old_news():
    members = Members(0, [A, Member(1, "b", "", 9)], is_open=True)

    assert members.left(1, 2) is None
    assert names(members) == ["a", "b"]


@pytest.mark.parametrize("claim", [Member(0, "x", "", 9), Member(5, "a", "", 9)])
def test_nobody_takes_the_place_of_the_one_who_asks(claim):
    with pytest.raises(BadMessage, match="claims the number of"):
        Members(0, [A, B], is_open=True).admit(claim)
