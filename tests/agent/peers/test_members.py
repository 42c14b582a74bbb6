"""Who is let in, whom a newcomer replaces, who has left."""

from __future__ import annotations

import pytest

from gradwire.agent.peers.directory import Directory, Member, WorkerInfo
from gradwire.errors import BadMessage, UnknownWorker

A, B, C = (Member(id, name, name, n) for id, name, n in [(0, "a", 1), (1, "b", 2), (2, "c", 3)])


def names(members):
    return [member.name for member in members.all()]


def test_a_closed_world_admits_nobody_new():
    members = Directory(0, [A, B])

    assert members.admit(B) == []
    with pytest.raises(BadMessage, match="c claims the number of worker 2"):
        members.admit(C)


def test_a_closed_world_admits_a_later_incarnation_of_a_member():
    members = Directory(0, [A, B])
    later = Member(1, "b", "elsewhere", 3)

    assert not members.had_earlier(1)
    assert members.admit(later) == [1]
    assert members.admit(later) == []
    assert (members.number("b"), members.address(1), members.incarnation(1)) == (1, "elsewhere", 3)
    assert members.had_earlier(1)
    with pytest.raises(BadMessage, match="b speaks for an earlier incarnation of b"):
        members.admit(B)


@pytest.mark.parametrize(
    "claim",
    [Member(1, "x", "", 9), Member(0, "b", "", 9), Member(2, "b", "", 9), Member(0, "a", "", 9)],
)
def test_nobody_else_takes_a_place_in_a_closed_world(claim):
    with pytest.raises(BadMessage, match="claims the number of"):
        Directory(0, [A, B]).admit(claim)


def test_an_open_world_admits_newcomers_once():
    members = Directory(0, [A], is_open=True)

    assert members.admit(B) == members.admit(B) == []
    assert names(members) == ["a", "b"]
    assert members.find("b") == members.find(1) == WorkerInfo("b", 1)


def test_one_that_left_is_remembered_by_number_only():
    members = Directory(0, [A, B], is_open=True)

    assert members.left(1, 2)
    assert not members.left(1, 2)
    for gone in ("b", 1):
        with pytest.raises(UnknownWorker):
            members.find(gone)
    assert (members.name(1), members.incarnation(1)) == ("b", 2)


@pytest.mark.parametrize(
    "later", [Member(1, "b", "", 9), Member(1, "other", "", 9), Member(7, "b", "", 9)]
)
def test_a_later_incarnation_takes_the_place_of_one_that_left_or_died(later):
    left, died = Directory(0, [A, B], is_open=True), Directory(0, [A, B], is_open=True)
    left.left(1, 2)

    assert left.admit(later) == []
    assert died.admit(later) == [1]
    assert left.all() == died.all() == [WorkerInfo("a", 0), WorkerInfo(later.name, later.id)]


def test_it_may_take_the_places_of_two():
    members = Directory(0, [A, B, C], is_open=True)

    assert members.admit(Member(1, "c", "", 9)) == [1, 2]
    assert names(members) == ["a", "c"]


@pytest.mark.parametrize("has_left", [True, False])
def test_an_earlier_incarnation_does_not_come_back(has_left):
    members = Directory(0, [A, Member(1, "b", "", 9)], is_open=True)
    if has_left:
        members.left(1, 9)

    with pytest.raises(BadMessage, match="b speaks for an earlier incarnation of b"):
        members.admit(B)


def test_a_late_goodbye_of_an_earlier_incarnation_is_old_news():
    members = Directory(0, [A, Member(1, "b", "", 9)], is_open=True)

    assert not members.left(1, 2)
    assert names(members) == ["a", "b"]


@pytest.mark.parametrize("claim", [Member(0, "x", "", 9), Member(5, "a", "", 9)])
def test_nobody_takes_the_place_of_the_one_who_asks(claim):
    with pytest.raises(BadMessage, match="claims the number of"):
        Directory(0, [A, B], is_open=True).admit(claim)
